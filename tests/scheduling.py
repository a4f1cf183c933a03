"""Hands files of tests to the processes of pytest-xdist; one that dies costs only the test in which it died.

pytest-xdist 3.8 loses or repeats what stood behind that test, and may wait forever (its issues 1327, 1371 and 1378).
"""

import subprocess
from contextlib import suppress
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

LEAST = 2  # tests that a process has: it starts one only when it knows the next


class FileScheduling(LoadFileScheduling):
    """Runs each file in one process, in the order of collection."""

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

    def _reschedule(self, node: WorkerController) -> None:
        while not node.shutting_down and self.workqueue and self._pending_of(self.assigned_work[node]) < LEAST:
            self._assign_work_unit(node)
        if not self.workqueue:
            node.shutdown()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileScheduling:
    return FileScheduling(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Say how a process of pytest-xdist ended that died; a signal is negative."""
    if error is not None:
        with suppress(AttributeError, subprocess.TimeoutExpired):
            print(f"\nthe process of {node.gateway.id} ended with {node.gateway._io.popen.wait(10)}", flush=True)
