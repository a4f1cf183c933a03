"""Keeps one command running, and ends all its processes when the one that asked for it is gone.

    python -m service.fleet.supervise <seconds to stop> <command> …

Ray kills the children of an actor that dies, but not theirs. So this process leaves the actor's family, leads a session
of its own with the command in it, and adopts what the command leaves behind. It ends them all once its standard input
is closed: only the actor holds the other end, and the kernel closes it however the actor dies. A line on standard input
asks the command to stop. On standard output this process says, one JSON object a line, when the command starts and
ends.
"""

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
STEADY_S = 120.0  # a command that ran for so long starts again without a long pause
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None)


def say(**about: Any) -> None:
    with suppress(OSError):  # the actor is gone, and the standard input says so too
        print(json.dumps(about), flush=True)


def supervise(command: list[str], stop_s: float) -> None:
    """Run the command again and again until a stop is asked for; then wait for it, for at most `stop_s`."""
    exits, quick = 0, 0
    while True:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, preexec_fn=_end_with_parent)
        started_at = time.monotonic()
        say(pid=process.pid, exits=exits)
        ended = os.pidfd_open(process.pid)
        asked = _wait([sys.stdin.fileno(), ended], None) == sys.stdin.fileno()
        if asked:
            _check_actor()
            process.terminate()
            if _wait([ended], stop_s) is None:
                process.kill()
        code = process.wait()
        os.close(ended)
        _end_others()
        exits += 1
        quick = 1 if time.monotonic() - started_at > STEADY_S else quick + 1
        say(exit=code, exits=exits)
        if asked:
            return
        pause_s = min(FIRST_PAUSE_S * 2 ** min(quick - 1, 10), LONGEST_PAUSE_S)
        if _wait([sys.stdin.fileno()], pause_s) is not None:
            _check_actor()
            return


def _wait(descriptors: list[int], seconds: float | None) -> int | None:
    """Wait until one of these can be read; return it, or None after `seconds`."""
    found, _, _ = select.select(descriptors, [], [], seconds)
    return found[0] if found else None


def _check_actor() -> None:
    """End everything at once if the actor is gone: its input has ended."""
    if not os.read(sys.stdin.fileno(), 4096):
        _end_others()
        os._exit(1)


def _end_others() -> None:
    """Kill all descendants and reap them. One that the kernel cannot end is left after a while."""
    until = time.monotonic() + 5.0
    while (left := _children()) and time.monotonic() < until:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # what it leaves behind becomes a child of this process
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        time.sleep(0.02)


def _children() -> list[int]:
    """Return this process's children, and those of its session wherever they are."""
    mine, found = os.getpid(), list[int]()
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != mine:
            with suppress(OSError):
                with open(f"/proc/{entry}/stat", "rb") as file:
                    _, parent, _, session = file.read().rpartition(b")")[2].split()[:4]
                if mine in (int(parent), int(session)):
                    found.append(int(entry))
    return found


def _end_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main() -> None:
    if os.fork():
        os._exit(0)
    os.setsid()
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    supervise(sys.argv[2:], float(sys.argv[1]))


if __name__ == "__main__":
    main()
