"""Reads from SGLang's scheduler all that a step is decided by, and changes nothing of it."""

from typing import Any, NamedTuple

import numpy as np

from engine_ext.arrays import Bools
from engine_ext.plugin.options import Overlap
from engine_ext.plugin.scheduler import online, preemption, resting
from engine_ext.plugin.scheduler.admission import Admission
from engine_ext.plugin.scheduler.radix import is_radix_cache
from engine_ext.step.view import NO_BOUNDS, NO_CHUNK, NO_DECODES, NO_LOAD, Chunk, View


class Seen(NamedTuple):
    """What a step is decided by. `now`: seconds of the ranks' clock. `able`: the requests of the view's columns.

    `rests`: bool [able], which the decision writes.
    """

    view: View
    now: float
    able: list[Any]
    rests: Bools


def look(ours: Admission, scheduler: Any, running: Any) -> Seen:
    """Return what SGLang's scheduler holds; `running`: its batch of all that decode.

    What online requests have got since the last look is noted first, for their deadlines depend on it.
    """
    now, demand = ours.ranks.tick(), ours.demand(scheduler, running.reqs)
    is_limited, decoding, chunk = ours.beside.is_needed, len(running.reqs), _chunk(ours, scheduler)
    fixed, kv, skipped, able, needs, bounds = NO_LOAD, NO_DECODES, NO_DECODES, list[Any](), demand.needs, NO_BOUNDS
    if is_limited:
        ours.beside.pass_time(demand, now)
        may_rest = ours.overlap is not Overlap.PDMUX and resting.can_rest(scheduler, running)
        fixed, kv, skipped, able = resting.split(running, ours.running, may_rest)
        needs, bounds = ours.beside.needs(demand, now)
    slots = scheduler.get_num_allocatable_reqs(decoding) - (scheduler.chunked_req is not None) - demand.waiting
    view = View(
        needs,
        chunk,
        is_limited,
        bounds,
        fixed,
        kv,
        skipped,
        decoding,
        int(running.seq_lens_cpu.sum()) + decoding if decoding else 0,  # each reads the token that it computes, too
        ours.decoded,
        ours.space.capacity - ours.space.free - ours.pins.tokens,
        ours.beside.kept_free,
        int(scheduler.page_size),
        min(max(0, slots), ours.space.windows),
        ours.most_prompt_tokens(scheduler, decoding),
        bool(ours.overlap.mixes and ours.not_mixed <= 0 and not (decoding and running.return_logprob)),
    )
    return Seen(view, now, able, np.zeros(len(able), dtype=np.bool_))


def _chunk(ours: Admission, scheduler: Any) -> Chunk:
    req = scheduler.chunked_req
    if req is None:
        return NO_CHUNK
    is_ours = req in ours.running
    can_park = bool(is_ours and preemption.can_park(scheduler))
    may_park = can_park and bool(ours.may_park(req))
    can_yield = is_ours and is_radix_cache(scheduler.tree_cache)
    return Chunk(online.uncomputed_tokens(req), len(req.prefix_indices), is_ours, can_park, may_park, can_yield)
