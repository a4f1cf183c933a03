"""Writes JSON as a line that no reader breaks."""

from typing import Any

import msgspec

# Characters that many readers take for the end of a line, as they stand inside strings and as JSON can escape them.
_ENDS = ((b"\xe2\x80\xa8", rb"\u2028"), (b"\xe2\x80\xa9", rb"\u2029"), (b"\xc2\x85", rb"\u0085"))


def line_of(value: Any) -> bytes:
    """Return the value as JSON, without the end of the line."""
    found = msgspec.json.encode(value)
    if not found.isascii():
        for end, escaped in _ENDS:
            found = found.replace(end, escaped)
    return found
