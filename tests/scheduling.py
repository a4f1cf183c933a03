"""Hands files of tests to the processes of pytest-xdist; one that dies costs only the test in which it died.

pytest-xdist 3.8 loses or repeats what stood behind that test, and may wait forever (its issues 1327, 1371 and 1378).
"""

import subprocess
from contextlib import suppress
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

# Ray's shutdown leaves threads behind, and after it a segmentation fault ends the process without a word.
# Processes died so in tests that ran long after Ray's.
ALONE = "tests/fleet/"
LEAST = 2  # tests that a process has: it starts one only when it knows the next


class FileScheduling(LoadFileScheduling):
    """Runs each file in one process, in the order of collection; a process that runs those of ALONE runs no others."""

    def remove_node(self, node: WorkerController) -> str | None:
        """Take back the tests that a process has not run, less the one in which it died, which this returns."""
        files = self.assigned_work.pop(node)
        left = {file: {test: False for test, is_done in tests.items() if not is_done} for file, tests in files.items()}
        left = {file: tests for file, tests in left.items() if tests}
        if not left:
            return None
        first = next(iter(left))
        crashed = next(iter(left[first]))
        del left[first][crashed]
        for file in reversed(left):
            if left[file]:
                self.workqueue[file] = left[file]
                self.workqueue.move_to_end(file, last=False)
        for other in self.assigned_work:
            self._reschedule(other)
        return crashed

    def _assign_work_unit(self, node: WorkerController) -> None:
        file = self._next_for(node)
        assert file is not None
        self.workqueue.move_to_end(file, last=False)
        super()._assign_work_unit(node)

    def _next_for(self, node: WorkerController) -> str | None:
        """Return the first file that this process may run."""
        had = {file.startswith(ALONE) for file in self.assigned_work[node]}
        others = [each for each in self.assigned_work if each is not node]
        is_taken = any(file.startswith(ALONE) for each in others for file in self.assigned_work[each])
        may_be_alone = not others or True in had or not (had or is_taken)
        may_be_other = not others or True not in had
        wanted = [file for file in self.workqueue if (may_be_alone if file.startswith(ALONE) else may_be_other)]
        if not had:  # those of ALONE come first: they take long
            wanted.sort(key=lambda file: not file.startswith(ALONE))
        return wanted[0] if wanted else None

    def _reschedule(self, node: WorkerController) -> None:
        if node not in self.registered_collections:  # it is starting
            return
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) < LEAST:
            if self._next_for(node) is None:
                node.shutdown()
            else:
                self._assign_work_unit(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileScheduling | None:
    return FileScheduling(config, log) if config.option.dist == "loadfile" else None


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Say how a process of pytest-xdist ended that died; a signal is negative."""
    if error is not None:
        with suppress(AttributeError, subprocess.TimeoutExpired):
            print(f"\nthe process of {node.gateway.id} ended with {node.gateway._io.popen.wait(10)}", flush=True)
