"""Decides a step from what `observe.py` saw: online requests first, the limit, who rests, the scan, and room."""

from typing import Any, NamedTuple

import numpy as np

from engine_ext.arrays import Bools
from engine_ext.plugin.scheduler.admission import Admission
from engine_ext.plugin.scheduler.beside import Allowed
from engine_ext.plugin.scheduler.observe import Chunked, View
from engine_ext.plugin.scheduler.online import length
from engine_ext.scan.decide import ANY_NUMBER
from engine_ext.scan.step import Step

NOBODY_RESTS: Bools = np.zeros(0, dtype=np.bool_)


class Room(NamedTuple):
    """What online prompts need free: so many KV `tokens`, and a request `slot`.

    `must`: the next chunk of one of them is computed whether there is room or not.
    """

    tokens: int
    slot: bool
    must: bool


class StepPlan(NamedTuple):
    """What a step does. `step`: the scan's decision; `budget`: the prompt tokens of all.

    `rests`: the decodes of batches that are left out. `parks`: the batch's prompt in chunks is stopped where it is.
    `room`: what online prompts need, for which requests of batches leave the engine; None where none waits.
    """

    step: Step
    budget: int
    rests: list[Any]
    parks: bool
    room: Room | None


def decide(ours: Admission, view: View) -> StepPlan:
    """Decide the step, in which online requests go first; nothing of SGLang is touched."""
    chunked = view.chunked if view.chunked is not None and view.chunked.is_ours else None
    allowed, rests = Allowed(view.demand.tokens, ANY_NUMBER, NOBODY_RESTS), list[Any]()
    if view.decodes is not None:
        before = chunked.computed if chunked else 0
        allowed = ours.beside.allow(view.demand, view.decodes, before, view.largest, view.now)
        rests = [view.able[place] for place in np.flatnonzero(allowed.rests)]
    step = _ask_scan(ours, view, chunked, allowed, rests)
    budget, parks = _way(view, chunked, max(step.budget, allowed.online), allowed.online)
    return StepPlan(step, budget, rests, parks, _room(view, None if parks else view.chunked))


def _ask_scan(ours: Admission, view: View, chunked: Chunked | None, allowed: Allowed, rests: list[Any]) -> Step:
    """Let the scan decide; to it, the prompts of online requests are admitted, and what they reserve is used."""
    pending = chunked.left if chunked else 0
    used = view.capacity - view.free + pending + view.demand.kv + view.demand.reserved + ours.beside.kept_free
    decoding, reads = view.decoding - len(rests), view.reads - sum(length(req) for req in rests)
    ours.scan.set_bursts(not view.mixes)
    pending += view.demand.tokens if view.mixes else 0  # an online prompt is no reason for a whole step of ours
    may_follow = ours.ranks.are_ready
    return ours.scan.decide(
        used, reads, decoding, pending, ours.decoded, view.slots, view.now, may_follow, allowed.most
    )


def _way(view: View, chunked: Chunked | None, budget: int, tokens: int) -> tuple[int, bool]:
    """Return the step's budget, and whether our prompt in chunks is parked: SGLang computes it before all others.

    It makes way if it leaves fewer than `tokens` to online prompts that wait. If it cannot, the step is longer.
    """
    if not view.demand.waiting or chunked is None or chunked.left + tokens <= budget:
        return budget, False
    return (budget, True) if chunked.may_park else (min(chunked.left + tokens, view.largest), False)


def _room(view: View, chunked: Chunked | None) -> Room | None:
    """Return what online prompts need.

    They are the one that is being computed, whose next chunk SGLang takes whether there is room or not, and the first
    that waits. One at least is admitted in each step, so what is taken off is no more than they need.
    """
    if not view.demand.prompts:
        return None
    tokens = view.demand.first + view.decoding + view.page + 1
    tokens += chunked.left if chunked and chunked.is_ours else 0
    return Room(tokens, view.demand.waiting > 0, chunked is not None and not chunked.is_ours)
