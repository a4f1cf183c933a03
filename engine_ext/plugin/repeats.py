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

    It takes some 10 us, near a loop up to 300 us: 0.3 us for each token of real answers.
    """
    return max((_seen(ids, view) for view in VIEWS), key=lambda found: found.tokens / found.wanted)


def _seen(ids: "array[int]", view: int) -> Repeat:
    end = ids[-view - LONGEST :]
    size, whole, tail = end.itemsize, end.tobytes(), end[-view:].tobytes()
    at = whole.rfind(tail, 0, len(whole) - size)
    while at % size and at >= 0:  # it begins within a token
        at = whole.rfind(tail, 0, at + len(tail) - 1)
    if at < 0:
        return Repeat()
    period = (len(whole) - len(tail) - at) // size
    wanted, run = max(REPEATS * period, LEAST), period + view
    while run < min(wanted, len(ids)) and ids[-run - 1] == ids[period - run - 1]:
        run += 1
    return Repeat(period, run, wanted)
