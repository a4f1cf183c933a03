"""Chooses which of a batch's requests leave the engine when online requests need its KV cache."""

import numpy as np

from engine_ext.arrays import Column
from engine_ext.compiled import compiled
from engine_ext.scan.footprint import generated, rest_of
from engine_ext.scan.state import NOT_STARTED, State


@compiled
def victims(state: State) -> Column:
    """Return the decoding requests of the batch, those first that would hold their KV cache for longest.

    What a request has computed may have to be computed again, in proportion to the KV cache that it holds. So the price
    of a freed token is the same for all, and what it buys is the time for which that token is free.
    """
    count = state.totals[0].running
    found, rests = np.empty(count, dtype=np.int64), np.empty(count)
    decoding = 0
    for k in range(count):
        request = state.running[k]
        if state.requests[request].started != NOT_STARTED:
            rest, _ = rest_of(state, int(request), generated(state, int(request)))
            found[decoding], rests[decoding] = request, rest
            decoding += 1
    # A stable order, so that all ranks choose the same.
    return found[:decoding][np.argsort(-rests[:decoding], kind="mergesort")]
