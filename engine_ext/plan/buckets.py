"""Cuts output lengths into buckets, in which answers are counted."""

import numpy as np

from engine_ext.arrays import Column
from engine_ext.compiled import compiled

LONGEST = 1 << 20  # tokens; no answer is longer
FINEST = 16  # tokens in the first buckets; later ones span about an eighth of their start, in multiples of this


def _bucket_edges() -> Column:
    edges = [0]
    while edges[-1] < LONGEST:
        edges.append(min(LONGEST, edges[-1] + max(FINEST, edges[-1] // 8 // FINEST * FINEST)))
    return np.array(edges, dtype=np.int64)


EDGES = _bucket_edges()
BUCKETS = len(EDGES) - 1
BUCKET_AT = (np.searchsorted(EDGES, np.arange(0, LONGEST, FINEST), side="right") - 1).astype(np.int16)


@compiled
def bucket_of(tokens: int) -> int:
    """Return the bucket of an answer with this many tokens."""
    return BUCKET_AT[min(tokens, LONGEST - 1) // FINEST]
