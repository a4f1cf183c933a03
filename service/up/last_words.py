"""Says in one line how a part of the service ended: by what, and what it wrote last."""

import json
import re
import signal
from pathlib import Path
from typing import Any, cast

READ_BYTES = 64 * 1024  # of the log's end
MOST = 200  # characters
BAD = ("error", "critical")
MORE = ("error", "exception", "exc_info")  # fields that say more of an event
_RAISED = re.compile(r"(error: |[A-Za-z_.]*(Error|Exception|Interrupt)\b)")  # a command's last line, or a traceback's


def how(code: int) -> str:
    """Return how a process ended, from its `Popen.returncode`."""
    if code >= 0:
        return f"exit {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def last_words(log: Path, begin: int = 0) -> str:
    """Return the last error in what a process has logged from byte `begin` on, else its last line; may be empty."""
    try:
        size = log.stat().st_size
        begin = begin if begin <= size else 0  # it was rotated since
        with log.open("rb") as opened:
            opened.seek(max(begin, size - READ_BYTES))
            lines = opened.read(READ_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return ""
    said = [each for each in map(_said, lines) if each[1]]
    words = next((text for is_bad, text in reversed(said) if is_bad), said[-1][1] if said else "")
    return words if len(words) <= MOST else f"{words[:MOST]} …"


def _said(line: str) -> tuple[bool, str]:
    """Return whether a line of a log names an error, and what it says."""
    try:
        found: Any = json.loads(line)
    except (ValueError, RecursionError):
        line = _shown(line)
        return bool(_RAISED.match(line)), line.removeprefix("error: ")
    if not isinstance(found, dict):
        return False, _shown(line)
    entry = cast(dict[str, Any], found)
    more = [(str(entry[name]).strip().splitlines() or [""])[-1] for name in MORE if entry.get(name)]
    return entry.get("level") in BAD, _shown(": ".join(filter(None, [str(entry.get("event", "")), *more])))


def _shown(text: str) -> str:
    """Return text that a terminal shows and does not obey."""
    return "".join(each if each.isprintable() else " " for each in text).strip()
