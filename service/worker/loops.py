"""Finds answers that ended in a loop: the same words again and again, until something cut them off.

Of 10,996 real answers this finds 87, and none that ever left its loop again (docs/results/loops.md).
"""

from collections.abc import Iterator

# The longest periods, in characters, each with as many characters at least in which it must hold. A short loop is found
# in a short answer; a long one has parts that repeat in themselves, which only a long view tells from the whole.
SCALES = (128, 1024)
REPEATS = 8  # of the period, at least: tables and lists repeat a row less often before they go on


def period_of(text: str) -> int:
    """Return the period of the loop in which a text ends, in characters; 0 if it ends in none."""
    for period, length in periods(text):
        if len(text) >= length and text[-length:-period] == text[period - length :]:
            return period
    return 0


def periods(text: str) -> Iterator[tuple[int, int]]:
    """Yield the period that a text's end may have at each scale, and in how many characters a loop has it."""
    for scale in SCALES:
        before = text.rfind(text[-scale:], max(0, len(text) - 2 * scale), len(text) - 1)
        if len(text) > scale and before >= 0:
            period = len(text) - scale - before
            yield period, max(REPEATS * period, scale + period)
