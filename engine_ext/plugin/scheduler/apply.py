"""Brings a step's plan into SGLang's scheduler: who leaves, who rests, who is shown to it, for how many tokens."""

from collections.abc import Callable
from typing import Any, NamedTuple

from engine_ext.plugin.scheduler import preemption, resting, turns
from engine_ext.plugin.scheduler.adapters import held_back, waits_for_adapter
from engine_ext.plugin.scheduler.admission import Admission
from engine_ext.plugin.scheduler.member import Reason
from engine_ext.plugin.scheduler.online import LOOKED_UP, is_ours, length
from engine_ext.plugin.scheduler.radix import cached_tokens
from engine_ext.step.plan import Room, StepPlan
from engine_ext.step.view import View


class Done(NamedTuple):
    """What became of a plan: SGLang's `batch` of prompts, or None; `running`, all that decode; those of them who rest.

    The latter are in a batch of their own, and not in `running`.
    """

    batch: Any
    running: Any
    rests: list[Any]


def apply(
    ours: Admission,
    scheduler: Any,
    running: Any,
    view: View,
    plan: StepPlan,
    admitted: list[int],
    rests: list[Any],
    ask_sglang: Callable[[], Any],
) -> Done:
    """Carry the plan out on SGLang's scheduler. Raises RanksDiverged, before SGLang is asked, if ranks do otherwise.

    `admitted`: the keys of the requests to admit; `rests`: the decodes to leave out.
    """
    rests = _clear_the_way(ours, scheduler, running, plan, rests)
    candidates = [ours.by_key[key].req for key in admitted]
    names = [req.rid for req in (*candidates, *ours.made_way, *rests)]
    ours.ranks.agree(plan.budget, plan.yields, names, ours.scan.is_ready)
    _make_room_among_pins(ours, scheduler, view, candidates)
    nothing_waits = not scheduler.waiting_queue and not scheduler.grammar_manager.has_waiting_grammars()
    if (plan.budget == 0 and nothing_waits) or ours.turns.are_decodes(running):
        ours.note_refused(candidates, first_blocks=False)
        return Done(None, running, rests)
    batch, running_after = _prefill(ours, scheduler, running, candidates, plan.budget, ask_sglang)
    return Done(batch, running_after, rests)


def _clear_the_way(ours: Admission, scheduler: Any, running: Any, plan: StepPlan, rests: list[Any]) -> list[Any]:
    """Park, take off and leave out what the plan says; return the decodes that are left out of `running`."""
    ours.made_way.clear()
    ours.figures.yielded += plan.yields
    if plan.parks:
        scheduler.chunked_req.batchweave_first = ()
        computed = len(scheduler.chunked_req.prefix_indices)
        with ours.copies.following():
            parked = preemption.park(scheduler)
        ours.stop(parked, Reason.PARKED, computed)
    elif scheduler.chunked_req in ours.running:  # who goes first has its tokens of the step (`adder_hooks.py`)
        scheduler.chunked_req.batchweave_first = scheduler.waiting_queue[:LOOKED_UP] if plan.yields else ()
    if plan.room.tokens > 0 and preemption.can_take_off(scheduler):
        _make_room(ours, scheduler, running, plan.room)
    rests = [req for req in rests if req in ours.running]
    if rests:
        ours.resting = resting.set_apart(running, set(rests))
        resting.HoldingKV.show_to(scheduler)
    return rests


def _make_room_among_pins(ours: Admission, scheduler: Any, view: View, candidates: list[Any]) -> None:
    """Release all pins if SGLang might not find room beside them for the step; the decision has not counted them."""
    left = view.chunk.left if view.chunk.is_ours else 0  # an online one is among `kv`
    needed = left + view.online.kv + view.online.reserved + view.decoding * view.page
    free = ours.space.free
    if free >= needed + sum(length(req) for req in candidates) or ours.pins.tokens == 0:
        return
    own = sum(length(req) - cached_tokens(scheduler.tree_cache, req).in_use for req in candidates)
    if free < needed + own:
        ours.pins.release()


def _make_room(ours: Admission, scheduler: Any, running: Any, room: Room) -> None:
    """Take requests of batches off the engine until there is room.

    What each of them frees is known when it has left, because prefixes may be shared.
    """
    gone: list[Any] = []

    def free() -> int:
        return ours.space.free + ours.copies.leaving_tokens

    def is_short() -> bool:
        slots = scheduler.get_num_allocatable_reqs(len(running.reqs) - len(gone)) - (scheduler.chunked_req is not None)
        return free() < room.tokens or (room.slot and slots < 1)

    if free() < room.tokens:
        ours.pins.release()
    if is_short():
        those = ours.victims(running, room.must)
        if not room.must and free() + sum(length(req) for req in those) < room.tokens:
            return  # nobody leaves for what would not help
        for req in those:
            if not is_short():
                break
            with ours.copies.following():
                preemption.release(scheduler, req)
            gone.append(req)
        preemption.leave(running, gone)
        for req in gone:
            ours.stop(req, Reason.TAKEN_OFF)
    if room.must and ours.space.free < room.tokens:
        ours.copies.finish()


def _prefill(
    ours: Admission, scheduler: Any, running: Any, candidates: list[Any], budget: int, ask_sglang: Callable[[], Any]
) -> tuple[Any, Any]:
    """Show SGLang the candidates behind the online requests that wait, and let it put together a step of prompts.

    Returns its batch, or None, and all that decode. What it did not take waits with us again.
    """
    continued, page = scheduler.chunked_req, scheduler.page_size
    if continued in ours.running:  # SGLang continues it in any case, and a prefill of no tokens would stop decoding
        budget = max(budget, page)
    chunk, others = scheduler.chunked_prefill_size, scheduler.waiting_queue
    must_wait = held_back(scheduler, others, candidates, running)
    scheduler.waiting_queue = [*others, *(req for req in candidates if req not in must_wait)]
    riding = len(running.reqs) if ours.overlap.mixes else 0
    if chunk is not None:  # else SGLang computes whole prompts: PD-multiplexing, and models that cannot do otherwise
        scheduler.chunked_prefill_size = -(-budget // page) * page + riding
    if candidates or others:
        running.batch_is_full = False  # the scan has checked that there is room
    running.batchweave_admits = True
    try:
        batch, running_after = ask_sglang()
    finally:
        running.batchweave_admits = False
        scheduler.chunked_prefill_size = chunk
        left = {req for req in scheduler.waiting_queue if is_ours(req)} | must_wait
        # SGLang has added those whose grammars are ready, behind ours.
        scheduler.waiting_queue = sorted((req for req in scheduler.waiting_queue if req not in left), key=turns.order)
    if others:
        ours.note_online(others, scheduler.waiting_queue)
    taken = [req for req in candidates if req not in left]
    # Else it is an online request that SGLang did not take, or an adapter that has no place yet.
    no_place = bool(must_wait) or waits_for_adapter(scheduler, candidates, running, batch)
    first_blocks = not (taken or scheduler.waiting_queue or no_place)
    ours.note_refused([req for req in candidates if req in left], first_blocks)
    ours.note_admitted(taken)
    ours.reuse.note(batch, continued, ours.running)
    return batch, running_after
