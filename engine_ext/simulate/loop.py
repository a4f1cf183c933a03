"""Drives a simulated engine by our dual scan."""

import numpy as np

from engine_ext.compiled import compiled
from engine_ext.costs.engine_model import StepModel
from engine_ext.scan.books import finished, prefilled, retracted
from engine_ext.scan.decide import ANY_NUMBER, decide
from engine_ext.scan.replan import is_outdated
from engine_ext.scan.state import State
from engine_ext.scan.sweep import has_drifted, waiting
from engine_ext.simulate.cache import Cache, evictable_leaves
from engine_ext.simulate.engine import DONE, Engine, admit, ends_of_decoding, room_for, step


@compiled
def run_batchweave(
    engine: Engine, cache: Cache, model: StepModel, state: State, decoded: int, answers: int, until_s: float
) -> int:
    """Let our dual scan decide every step, until all requests have ended or another plan is due.

    `answers` is how many more answers make a plan due; one is due at `until_s` in any case. `decoded` is the output
    tokens that each decoding request has got and `state` has not been told; the function returns the same for its
    last step.
    """
    heap, ends = evictable_leaves(cache), ends_of_decoding(engine)
    totals = engine.totals[0]
    steps, left = 0, np.count_nonzero(engine.state != DONE)
    while left > 0 and totals.seconds < until_s:
        if is_outdated(waiting(state), has_drifted(state), steps, answers):
            break
        steps += 1
        budget, admitted_count = decide(
            state,
            cache.tokens[0].locked,
            totals.decoding_kv,
            totals.decoding,
            totals.pending,
            decoded,
            len(engine.leaf),
            ANY_NUMBER,
        )
        for k in range(admitted_count):
            request = int(state.admitted[k])
            if room_for(cache, int(engine.leaf[request])) < engine.generated[request]:
                # Its prefix was evicted, so it needs more room than the scan expected: it waits.
                retracted(state, request, int(engine.generated[request]))
            else:
                admit(engine, cache, heap, model, request)
        decoded = step(engine, cache, heap, ends, model, budget)
        for k in range(totals.retracted):
            retracted(state, int(engine.retracted[k]), int(engine.generated[engine.retracted[k]]))
        for k in range(totals.finished):
            finished(state, int(engine.finished[k]), int(engine.output[engine.finished[k]]))
            answers -= state.requests[int(engine.finished[k])].known < 0
        left -= totals.finished
        for k in range(totals.prefilled):
            prefilled(state, int(engine.prefilled[k]))
    return decoded
