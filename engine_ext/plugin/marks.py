"""Names the marks that a worker puts into a request's `custom_params`, which SGLang carries to the scheduler."""

import math
from typing import Any

KIND = "batchweave_kind"  # requests of one kind are alike in more than their prompts, such as those of one batch
UNTOLD = "batchweave_untold"  # beside KIND: the request ends at max_tokens, and the scheduler is not told
DUE = "batchweave_due"  # beside KIND: when it must have ended, by this host's time.monotonic
LENGTHS = "batchweave_lengths"  # beside KIND: the profile of earlier answers to requests like it (plan/memory.py)
RESERVED = frozenset({KIND, UNTOLD, DUE, LENGTHS})


def marks(kind: str, due: float = math.inf, lengths: str = "") -> dict[str, Any]:
    """Return the marks of a request of this kind, with its deadline and profile if it has them."""
    given: dict[str, Any] = {KIND: kind}
    if not math.isinf(due):
        given[DUE] = due
    if lengths:
        given[LENGTHS] = lengths
    return given
