"""The process that keeps a worker of a fleet running, and that leaves none behind."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import psutil
import pytest

# Leaves two children of its own: one in its session, one that has left it.
COMMAND = """
import os, pathlib, subprocess, sys, time
here = pathlib.Path(sys.argv[1])
for session in (False, True):
    with open(here / "pids", "a") as pids:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=session)
        print(child.pid, os.getpid(), file=pids)
if (here / "fails").exists():
    sys.exit(4)
if (here / "deaf").exists():
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
(here / "ready").touch()
time.sleep(600)
"""


@pytest.fixture
def supervised(tmp_path: Path) -> Generator[Callable[..., "subprocess.Popen[bytes]"]]:
    running: list[subprocess.Popen[bytes]] = []

    def start(*flags: str, stop_s: float = 30.0) -> "subprocess.Popen[bytes]":
        for flag in flags:
            (tmp_path / flag).touch()
        words = [sys.executable, "-m", "service.fleet.supervise", str(stop_s), sys.executable, "-c", COMMAND]
        process = subprocess.Popen([*words, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        running.append(process)
        return process

    yield start
    for process in running:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


def pids(folder: Path) -> set[int]:
    """Return the processes of the command and its children, that ever were."""
    return {int(word) for word in (folder / "pids").read_text().split()}


def wait(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 60.0
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.02)


def said(process: "subprocess.Popen[bytes]") -> dict[str, Any]:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def none_is_left(folder: Path) -> bool:
    return not any(psutil.pid_exists(pid) for pid in pids(folder))


def test_no_process_is_left_when_its_input_ends(supervised: Any, tmp_path: Path) -> None:
    process = supervised()
    wait(lambda: (tmp_path / "ready").exists())
    assert len([pid for pid in pids(tmp_path) if psutil.pid_exists(pid)]) == 3
    process.stdin.close()
    wait(lambda: none_is_left(tmp_path))


@pytest.mark.parametrize("flag", ["", "deaf"])
def test_a_stop_is_waited_for_and_then_forced(supervised: Any, tmp_path: Path, flag: str) -> None:
    process = supervised(*filter(None, [flag]), stop_s=0.5 if flag else 30.0)
    assert said(process)["exits"] == 0
    wait(lambda: (tmp_path / "ready").exists())
    process.stdin.write(b"stop\n")
    process.stdin.flush()
    assert said(process) == {"exit": -9 if flag else -15, "exits": 1}
    assert process.stdout.read() == b"", "it has ended"
    wait(lambda: none_is_left(tmp_path))


def test_a_command_that_fails_starts_again_without_what_it_left(supervised: Any, tmp_path: Path) -> None:
    process = supervised("fails")
    first = said(process)
    assert said(process) == {"exit": 4, "exits": 1}
    assert none_is_left(tmp_path)
    (tmp_path / "fails").unlink()
    again = said(process)
    assert (again["exits"], again["pid"] != first["pid"]) == (1, True)
    wait(lambda: (tmp_path / "ready").exists())


def test_a_stop_between_two_starts_is_the_end(supervised: Any, tmp_path: Path) -> None:
    process = supervised("fails")
    for _ in range(2):
        said(process)
    process.stdin.write(b"stop\n")
    process.stdin.flush()
    assert process.stdout.read() == b""
    assert none_is_left(tmp_path)


def test_the_command_ends_with_its_supervisor(supervised: Any, tmp_path: Path) -> None:
    process = supervised()
    command = psutil.Process(said(process)["pid"])
    wait(lambda: (tmp_path / "ready").exists())
    supervisor = command.parent()
    assert supervisor is not None
    supervisor.kill()
    wait(lambda: not command.is_running())
    for pid in pids(tmp_path):  # nothing is left that could end these
        if psutil.pid_exists(pid):
            psutil.Process(pid).kill()
