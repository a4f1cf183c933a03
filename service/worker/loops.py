"""Finds answers that ended in a loop: the same words again and again, until something cut them off.

Of 10,996 real answers this finds 87, and none that ever left its loop again (docs/results/loops.md).
"""

# The longest periods, in characters, each with as many characters at least in which it must hold. A short loop is found
# in a short answer; a long one has parts that repeat in themselves, which only a long view tells from the whole.
SCALES = (128, 1024)
REPEATS = 8  # of the period, at least: tables and lists repeat a row less often before they go on


def period_of(text: str) -> int:
    """Return the period of the loop in which a text ends, in characters; 0 if it ends in none."""
    for scale in SCALES:
        before = text.rfind(text[-scale:], max(0, len(text) - 2 * scale), len(text) - 1)
        if len(text) > scale and before >= 0:
            period = len(text) - scale - before
            looped = max(REPEATS * period, scale + period)
            if len(text) >= looped and text[-looped:-period] == text[period - looped :]:
                return period
    return 0
