"""Says in one line how a part of the service ended: by what, and what it wrote last."""

import json
import re
import signal
from pathlib import Path
from typing import Any, cast

READ_BYTES = 64 * 1024  # of the log's end
MOST = 400  # characters
BAD = ("error", "critical")
MORE = ("error", "exception", "exc_info")  # fields that say more of an event
# A command's last line, a traceback's, or a crash's.
_RAISED = re.compile(r"(error: |Fatal |terminate called|[A-Za-z_.]*(Error|Exception|Interrupt)\b)")
_MODULE = re.compile(r"^(\w+\.)+(?=\w*(Error|Exception)\b)")  # of an exception's class
CONSEQUENCE = "Received sigquit"  # SGLang's word for the death of a child, which has said why before


def how(code: int) -> str:
    """Return how a process ended, from its `Popen.returncode`."""
    if code >= 0:
        return f"exit {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def last_words(log: Path, begin: int = 0) -> str:
    """Return the last error in what a process has logged from byte `begin` on; empty if it named none."""
    try:
        size = log.stat().st_size
        begin = begin if begin <= size else 0  # it was rotated since
        with log.open("rb") as opened:
            opened.seek(max(begin, size - READ_BYTES))
            lines = opened.read(READ_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return ""
    said = map(_said, reversed(lines))
    words = next((text for is_bad, text in said if is_bad and text and not text.startswith(CONSEQUENCE)), "")
    return words if len(words) <= MOST else f"{words[:MOST]} …"


def _said(line: str) -> tuple[bool, str]:
    """Return whether a line of a log names an error, and what it says."""
    try:
        found: Any = json.loads(line)
    except (ValueError, RecursionError):
        line = _shown(line)
        return bool(_RAISED.match(line)), _MODULE.sub("", line.removeprefix("error: ").strip())
    if not isinstance(found, dict):
        return False, _shown(line)
    entry = cast(dict[str, Any], found)
    more = [(str(entry[name]).strip().splitlines() or [""])[-1] for name in MORE if entry.get(name)]
    event = str(entry.get("event", "")).strip()
    if "Traceback" in event:  # only its end says what happened
        event = event.splitlines()[-1]
    return entry.get("level") in BAD, _MODULE.sub("", _shown(": ".join(filter(None, [event, *more]))))


def _shown(text: str) -> str:
    """Return text that a terminal shows and does not obey."""
    return "".join(each if each.isprintable() else " " for each in text).strip()
