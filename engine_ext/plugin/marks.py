"""Names the marks that a worker puts into a request's `custom_params`, which SGLang carries to the scheduler."""

import math
from typing import Any

KIND = "batchweave_kind"  # requests of one kind are alike in more than their prompts, such as those of one batch
UNTOLD = "batchweave_untold"  # beside KIND: the request ends at max_tokens, and the scheduler is not told
DUE = "batchweave_due"  # beside KIND: when it must have ended, by this host's time.monotonic
RESERVED = frozenset({KIND, UNTOLD, DUE})


def marks(kind: str, due: float = math.inf) -> dict[str, Any]:
    """Return the marks of a request of this kind, with its deadline if it has one."""
    return {KIND: kind} if math.isinf(due) else {KIND: kind, DUE: due}
