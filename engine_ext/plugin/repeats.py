"""Finds out, while an answer grows, whether its end repeats itself: a loop that it will not leave.

Of 10,996 real answers none that was in such a loop ever left it (docs/results/loops.md).
"""

from array import array
from typing import NamedTuple

LONGEST = 400  # tokens of a period
REPEATS = 8  # of the period, which make a loop
LEAST = 256  # tokens that a loop has; a googol's zeros and a table's dashes are fewer
# Tokens at the end that also stand one period before, where it may be a loop. A long period has parts that repeat in
# themselves, which only the long view tells from the whole.
VIEWS = (16, 128)
EVERY = 64  # tokens from one look to the next, unless a loop is due before


class Repeat(NamedTuple):
    """How many tokens at an answer's end repeat what is `period` tokens before, and how many would be a loop."""

    period: int = 0
    tokens: int = 0
    wanted: int = EVERY

    @property
    def due_in(self) -> int:
        """In how many more tokens it would be a loop; 0 if it is one."""
        return max(0, self.wanted - self.tokens)


def repeat_of(ids: "array[int]") -> Repeat:
    """Return the repeat at the end of these tokens that is nearest to a loop.

    What it takes: docs/results/loops.md.
    """
    return max((_seen(ids, view) for view in VIEWS), key=lambda found: found.tokens / found.wanted)


def _seen(ids: "array[int]", view: int) -> Repeat:
    # Backwards, because `find` takes linear time, and `rfind` may not.
    end = ids[: -view - LONGEST - 1 : -1]
    size, whole = end.itemsize, end.tobytes()
    tail = whole[: view * size]
    at = whole.find(tail, size) if len(tail) == view * size else -1
    while at % size and at >= 0:  # it begins within a token
        at = whole.find(tail, at + 1)
    if at < 0:
        return Repeat()
    period = at // size
    wanted = max(REPEATS * period, LEAST)
    return Repeat(period, _repeated(ids[-wanted:], period, period + view), wanted)


def _repeated(ids: "array[int]", period: int, least: int) -> int:
    """Return how many tokens at the end have this period: all of them, or `least` at the least."""
    data, size = ids.tobytes(), ids.itemsize

    def has(tokens: int) -> bool:
        part = data[len(data) - tokens * size :]
        return part[period * size :] == part[: len(part) - period * size]

    if has(len(ids)):
        return len(ids)
    most = len(ids)
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if has(middle) else (least, middle)
    return least
