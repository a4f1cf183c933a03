"""Keeps one command running, and ends all its processes when the one that asked for it is gone.

    python -m service.fleet.supervise <seconds to stop> <command> …

Ray kills the children of an actor that dies, but not theirs. So this process leaves the actor's family, leads a session
of its own with the command in it, and ends the session once its standard input is closed: only the actor holds the
other end, and the kernel closes it however the actor dies. A line on standard input asks the command to stop. On
standard output it says, one JSON object a line, when the command starts and ends.
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
STEADY_S = 120.0  # a command that ran for so long has not failed at its start
_PR_SET_CHILD_SUBREAPER = 36


def say(**about: Any) -> None:
    with suppress(OSError):  # the actor is gone, and the standard input says so too
        print(json.dumps(about), flush=True)


def supervise(command: list[str], stop_s: float) -> None:
    """Run the command again and again until a stop is asked for; then wait for it, for at most `stop_s`."""
    failures = 0
    while True:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)
        started_at = time.monotonic()
        say(pid=process.pid)
        ended = os.pidfd_open(process.pid)
        asked = _wait([sys.stdin.fileno(), ended], None) == sys.stdin.fileno()
        if asked:
            _check_actor()
            process.terminate()
            _wait([ended], stop_s)
            if process.poll() is None:
                process.kill()
        os.close(ended)
        code = process.wait()
        failures = 1 if time.monotonic() - started_at > STEADY_S else failures + 1
        say(exit=code, failures=failures, asked=asked)
        _end_leftovers()
        if asked:
            return
        if _wait([sys.stdin.fileno()], min(FIRST_PAUSE_S * 2 ** (failures - 1), LONGEST_PAUSE_S)) is not None:
            _check_actor()
            return


def _wait(descriptors: list[int], seconds: float | None) -> int | None:
    """Wait until one of these can be read; return it, or None after `seconds`."""
    found, _, _ = select.select(descriptors, [], [], seconds)
    return found[0] if found else None


def _check_actor() -> None:
    """End everything at once if the actor is gone: its input has ended."""
    if not os.read(sys.stdin.fileno(), 4096):
        os.killpg(0, signal.SIGKILL)


def _end_leftovers() -> None:
    """Kill what the command left behind; it is in this process's session, and so is this process."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for pid in _session():
        if pid != os.getpid():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    while True:
        try:
            if os.waitpid(-1, 0) == (0, 0):
                return
        except ChildProcessError:
            return


def _session() -> list[int]:
    """Return the processes of this session."""
    found: list[int] = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                if os.getsid(int(entry)) == os.getsid(0):
                    found.append(int(entry))
            except ProcessLookupError:
                continue
    return found


def main() -> None:
    if os.fork():
        os._exit(0)
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    supervise(sys.argv[2:], float(sys.argv[1]))


if __name__ == "__main__":
    main()
