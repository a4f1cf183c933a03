"""Runs the stages of a plan, one process for each group, and kills a process that outlasts its stage's limit.

A stage that has ended is not run again, so the same command continues after a crash, a kill or the end of its time.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from benchmarks.gpu.plan import ENGINE, Group, Stage
from benchmarks.gpu.records import Folder

GRACE_S = 5.0  # for a stage that keeps its own limit
LOOKS_S = 0.2
STARTS_S = 90.0  # for a process to begin its first stage: it imports SGLang
CLOSES_S = 30.0  # between two stages, and to end after the last one
KILL_S = 10.0
TIME_IS_UP = "the time is up"
FAILURES = 2  # to start a group's process or its engine, after which its stages are given up


def run(plan: Sequence[Stage], folder: Folder, ends: float) -> None:
    """Run what has not ended, until the time `ends` of the monotonic clock."""
    for group in Group:
        failures = 0
        while left := left_of(plan, folder, group):
            starts_s = next((stage.least_s for stage in plan if stage.is_start and stage.group is group), 0)
            if time.monotonic() + max(starts_s, left[0].least_s) > ends:
                break
            before = len(folder.stages)
            _run_group(group, folder, ends, before)
            new = folder.stages[before:]
            if new and not any("failed" in each for each in new if each["stage"].endswith(ENGINE)):
                continue
            failures += 1
            if failures == FAILURES and time.monotonic() < ends:
                for stage in left_of(plan, folder, group):
                    folder.ends(stage.name, time.monotonic(), failed=f"it cannot start: {_last_line(folder, group)}")


def _last_line(folder: Folder, group: Group) -> str:
    lines = (folder.path / f"{group}.log").read_text(errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "its log is empty")[:300]


def left_of(plan: Sequence[Stage], folder: Folder, group: Group) -> list[Stage]:
    ended = folder.ended
    return [stage for stage in plan if stage.group is group and stage.name not in ended]


def command(group: Group, folder: Folder, ends: float) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu.stages", group, str(folder.path), str(ends), str(os.getpid())]


def _run_group(group: Group, folder: Folder, ends: float, before: int) -> None:
    """Run one process until it ends, or until its stage or the whole takes too long; then kill all that it started.

    `before`: the lines of stages that others have written.
    """
    with (folder.path / f"{group}.log").open("ab") as log:
        process = subprocess.Popen(
            command(group, folder, ends), stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )
    try:
        reason = _watch(process, folder, ends, before)
    finally:
        _end(process)
    if (stage := folder.under_way(before)) is not None:
        how = reason or f"its process ended with {process.returncode}; see {group}.log"
        folder.ends(stage["stage"], stage["at"], failed=how, **({"cut": True} if reason == TIME_IS_UP else {}))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what the process started, and wait for the GPU's memory; not for what hangs inside the driver."""
    until = time.monotonic() + KILL_S
    with suppress(ProcessLookupError):
        while time.monotonic() < until:
            os.killpg(process.pid, signal.SIGKILL)
            process.poll()
            time.sleep(LOOKS_S)


def _watch(process: subprocess.Popen[bytes], folder: Folder, ends: float, before: int) -> str | None:
    """Return why the process must be killed; None if it has ended."""
    idle_since = time.monotonic()
    while process.poll() is None:
        now, stage = time.monotonic(), folder.under_way(before)
        if now > ends:
            return TIME_IS_UP
        if stage is None:
            has_begun = len(folder.stages) > before
            if now - idle_since > (CLOSES_S if has_begun else STARTS_S):
                return None
        else:
            idle_since = now
            if now > stage["at"] + stage["limit_s"] + GRACE_S:
                return f"killed {now - stage['at'] - stage['limit_s']:.0f} s after its limit"
        time.sleep(LOOKS_S)
    return None
