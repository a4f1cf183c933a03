"""Reads from SGLang's scheduler all that a step is decided by, before anything is changed."""

from typing import Any, NamedTuple

from engine_ext.plugin.options import Overlap
from engine_ext.plugin.scheduler import online, preemption, resting
from engine_ext.plugin.scheduler.admission import Admission
from engine_ext.plugin.scheduler.beside import Decodes
from engine_ext.plugin.scheduler.online import Demand

ROOM = 2  # tokens of each decode for which there must be room if some are left out; a step may still run


class Chunked(NamedTuple):
    """The prompt that SGLang computes in chunks, of which `left` tokens are not computed yet and `computed` are.

    `is_ours`: it is of a batch; `may_park`: it may be stopped where it is.
    """

    left: int
    computed: int
    is_ours: bool
    may_park: bool


class View(NamedTuple):
    """What a step may know of the engine; tokens, if not said otherwise.

    `now`: seconds of the ranks' clock. `demand`: what online requests need. `decodes`, `able`: what decodes, and the
    requests that the step may leave out, in the order of its columns; None where no online request bounds the step.
    `chunked`: the prompt in chunks, if there is one. `decoding`, `reads`: requests that decode, and KV tokens that they
    read. `slots`: requests that may still be admitted. `free`, `capacity`: of the KV cache. `page`: of the KV cache.
    `largest`: prompt tokens of the largest step. `mixes`: decodes ride in a step with prompts.
    """

    now: float
    demand: Demand
    decodes: Decodes | None
    able: list[Any]
    chunked: Chunked | None
    decoding: int
    reads: int
    slots: int
    free: int
    capacity: int
    page: int
    largest: int
    mixes: bool


def look(ours: Admission, scheduler: Any, running: Any) -> View:
    """Return what SGLang's scheduler holds; `running`: its batch of all that decode."""
    now, demand = ours.ranks.tick(), ours.demand(scheduler, running.reqs)
    decodes, able = None, list[Any]()
    if ours.beside.is_needed:
        decodes, able = resting.split(running, ours.running, _may_rest(ours, scheduler, running))
    decoding, chunked = len(running.reqs), _chunked(ours, scheduler)
    slots = scheduler.get_num_allocatable_reqs(decoding) - (chunked is not None) - demand.waiting
    return View(
        now,
        demand,
        decodes,
        able,
        chunked,
        decoding,
        int(running.seq_lens_cpu.sum()) if decoding else 0,
        min(max(0, slots), ours.space.windows),
        ours.space.free,
        ours.space.capacity,
        int(scheduler.page_size),
        ours.most_prompt_tokens(scheduler, decoding),
        ours.overlap.mixes and ours.not_mixed <= 0 and not running.return_logprob,
    )


def _chunked(ours: Admission, scheduler: Any) -> Chunked | None:
    req = scheduler.chunked_req
    if req is None:
        return None
    is_ours = req in ours.running
    may_park = is_ours and ours.may_park(req) and preemption.can_park(scheduler)
    return Chunked(online.uncomputed_tokens(req), len(req.prefix_indices), is_ours, may_park)


def _may_rest(ours: Admission, scheduler: Any, running: Any) -> bool:
    """Return whether decodes of batches may be left out of the step.

    Where the KV cache might not do for all, SGLang has to see them: it retracts them, and not online requests.
    """
    needed = ROOM * scheduler.page_size * len(running.reqs)
    return ours.overlap is not Overlap.PDMUX and ours.space.free >= needed and resting.can_rest(scheduler, running)
