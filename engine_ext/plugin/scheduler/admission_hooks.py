"""Brings the dual scan's admissions into SGLang's scheduler, by wrapping functions of it.

In each step, `admit` tells the scan what the KV cache really holds, shows SGLang the requests that the scan admits, in
its order, and allows as many prompt tokens as the scan does. Online requests go before them (`online.py`).
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from sglang.srt.plugins.hook_registry import HookType

from engine_ext.arrays import Bools
from engine_ext.plugin.options import Overlap
from engine_ext.plugin.scheduler import (
    adder_hooks,
    foresight,
    host_copies,
    online,
    preemption,
    pulse_hooks,
    resting,
    turns,
    withdrawals,
)
from engine_ext.plugin.scheduler.adapters import held_back, waits_for_adapter
from engine_ext.plugin.scheduler.admission import Admission, admission_of
from engine_ext.plugin.scheduler.beside import Allowed
from engine_ext.plugin.scheduler.online import Demand, is_ours, length
from engine_ext.plugin.scheduler.step_load import load_of, load_of_decodes
from engine_ext.scan.decide import ANY_NUMBER
from engine_ext.scan.step import Step

ROOM = 2  # tokens of each decode for which there must be room if some are left out; a step may still run
NOBODY_RESTS: Bools = np.zeros(0, dtype=np.bool_)
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"


def enqueue(original: Callable[..., None], scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    """Move one of our requests from SGLang's queue to ours."""
    original(scheduler, req, *args, **kwargs)
    queue, ours = scheduler.waiting_queue, admission_of(scheduler)
    if not is_ours(req) and ours.fallback is None:
        if queue and queue[-1] is req:
            ours.turns.came(queue)
        ours.online_runs = True
        ours.beside.arrived(req, ours.ranks.tick())
    if queue and queue[-1] is req and is_ours(req) and ours.fallback is None:
        started = time.perf_counter()
        ours.add(queue.pop())
        ours.note_time(time.perf_counter() - started, is_step=False)


def begin_step(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Show SGLang all that decode, with those that the last step left out."""
    if "running_batch" in kwargs:  # else it is no loop of an engine that the scan drives
        kwargs["running_batch"] = _all_decodes(admission_of(scheduler), kwargs["running_batch"])
    return original(scheduler, *args, **kwargs)


def admit(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Show SGLang the requests that the scan admits, in its order, and allow as many prompt tokens as it does."""
    ours, running = admission_of(scheduler), kwargs["running_batch"]
    if ours.overlap is Overlap.PDMUX and scheduler._engine_paused:  # its loop would continue
        return None, running
    started, theirs_s = time.perf_counter(), 0.0

    def ask_sglang() -> Any:
        nonlocal theirs_s
        asked = time.perf_counter()
        found = original(scheduler, *args, **kwargs)
        theirs_s = time.perf_counter() - asked
        return found

    held, has_batches = ours.hold_back(scheduler, running.reqs), bool(ours.waiting or ours.running)
    before = scheduler.waiting_queue
    if ours.fallback is None:
        ours.turns.note_first(scheduler)
    try:
        step = _step if has_batches else _without_batches
        found = step(ours, scheduler, running, ask_sglang)
    finally:
        if ours.fallback is None:
            ours.turns.show(scheduler, before, held)
    if ours.fallback is None and ours.overlap is not Overlap.PDMUX:  # there decodes continue during a prefill
        ours.turns.note_step(found[0])
    _foresee(ours, scheduler, found[1])
    if has_batches:
        ours.note_time(time.perf_counter() - started - theirs_s)
    return found


def _foresee(ours: Admission, scheduler: Any, running: Any) -> None:
    """Tell the worker what a new online request would meet, if it refuses those that would be late."""
    if ours.foresees and ours.ranks.is_first:
        pulse_hooks.foresaw(scheduler, foresight.foresee(ours, scheduler, running.reqs, ours.ranks.now))


def _all_decodes(ours: Admission, running: Any) -> Any:
    """Return the batch of all that decodes, with those that the last step left out."""
    if ours.resting is not None:
        running, ours.resting = resting.join(running, ours.resting), None
    return running


def _without_batches(ours: Admission, scheduler: Any, running: Any, ask_sglang: Callable[[], Any]) -> Any:
    """Leave the step to SGLang, and note only how the online requests fare."""
    continued = scheduler.chunked_req
    if ours.ranks.group is None:
        now = ours.ranks.tick()
        if ours.beside.is_needed:
            ours.beside.pass_time(online.those_here(scheduler, running), now)
    else:  # the ranks agree on a time only in steps with batches
        ours.beside.forget()
    batch, running_after = (None, running) if ours.turns.are_decodes(running) else ask_sglang()
    ours.reuse.note(batch, continued, ours.running)
    _note_launch(ours, batch, running_after)
    ours.online_runs = True
    return batch, running_after


def _note_launch(ours: Admission, batch: Any, running: Any) -> None:
    """Note the step that is launched now: a batch of prompts, or else all that decode."""
    if not ours.beside.is_needed:
        return
    if batch is None:
        reqs = [req for req in running.reqs if not req.finished()]
        theirs = [req for req in reqs if not is_ours(req)]
        ours.beside.launched(load_of_decodes(reqs), load_of_decodes(theirs))
    else:
        theirs = np.array([not is_ours(req) for req in batch.reqs], dtype=np.bool_)
        ours.beside.launched(load_of(batch), load_of(batch, theirs))


def _step(ours: Admission, scheduler: Any, running: Any, ask_sglang: Callable[[], Any]) -> Any:
    ours.copies.begin_step()
    changed = ours.notice_ends(running.reqs, scheduler.chunked_req)
    ours.notice_stored()
    is_beside = ours.overlap is Overlap.PDMUX  # decodes continue during a prefill, and SGLang asks between prefills
    if is_beside:
        ours.store_all()
    if not ours.running:
        ours.pins.keep([], again=False)
    step, budget, left_out = _decide(ours, scheduler, running)
    continued = scheduler.chunked_req
    if is_beside:  # they decode from here on; tokens decoded during their prefill were not theirs
        ours.prefilled(None)
    candidates = [ours.by_key[key].req for key in step.admitted]
    ours.ranks.agree(budget, [req.rid for req in (*candidates, *ours.made_way, *left_out)], ours.scan.is_ready)
    ours.steps += 1
    ours.decoded = 0 if is_beside else 1
    nothing_waits = not scheduler.waiting_queue and not scheduler.grammar_manager.has_waiting_grammars()
    if (budget == 0 and nothing_waits) or ours.turns.are_decodes(running):
        ours.note_refused(candidates, first_blocks=False)
        ours.keep_prefixes(changed, ours.space.free)
        return None, _note_step(ours, None, running, left_out)
    if continued in ours.running:  # SGLang continues it in any case, and a prefill of no tokens would stop decoding
        budget = max(budget, scheduler.page_size)
    chunk, others = scheduler.chunked_prefill_size, scheduler.waiting_queue
    must_wait = held_back(scheduler, others, candidates, running)
    scheduler.waiting_queue = [*others, *(req for req in candidates if req not in must_wait)]
    page, riding = scheduler.page_size, len(running.reqs) if ours.overlap.mixes else 0
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
    if batch is not None and not is_beside:
        ours.prefilled(scheduler.chunked_req)
        ours.decoded = int(batch.decoding_reqs is not None)
    ours.keep_prefixes(changed or batch is not None, ours.space.free)
    return batch, _note_step(ours, batch, running_after, left_out)


def _note_step(ours: Admission, batch: Any, running: Any, left_out: list[Any]) -> Any:
    """Note the step that is launched now, and return what decodes, with those who rest if nothing else is done."""
    if batch is None and running.is_empty():
        running, left_out = _all_decodes(ours, running), []
    _note_launch(ours, batch, running)
    ours.note_left_out(left_out, running.reqs if batch is None else batch.decoding_reqs or [])
    return running


def _decide(ours: Admission, scheduler: Any, running: Any) -> tuple[Step, int, list[Any]]:
    """Decide the step, in which online requests go first.

    Returns the scan's decision, the prompt tokens of all, and the decodes that are left out; they are not in `running`
    any more.
    """
    now, demand = ours.ranks.tick(), ours.demand(scheduler, running.reqs)
    continued, largest = scheduler.chunked_req, ours.most_prompt_tokens(scheduler, len(running.reqs))
    allowed, left_out = Allowed(demand.tokens, ANY_NUMBER, NOBODY_RESTS), list[Any]()
    if ours.beside.is_needed:
        ours.beside.pass_time(demand, now)
        before = len(continued.prefix_indices) if continued in ours.running else 0
        decodes, able = resting.split(running, ours.running, _may_rest(ours, scheduler, running))
        allowed = ours.beside.allow(demand, decodes, before, largest, now)
        left_out = [able[place] for place in np.flatnonzero(allowed.rests)]
    ours.made_way.clear()
    step = _ask_scan(ours, scheduler, running, demand, allowed, left_out)
    budget = max(step.budget, allowed.online)
    if demand.waiting:
        budget = _make_way(ours, scheduler, budget, allowed.online, largest)
    if demand.prompts:
        _make_room(ours, scheduler, running, demand)
    left_out = [req for req in left_out if req in ours.running]
    if left_out:
        ours.resting = resting.set_apart(running, set(left_out))
        resting.HoldingKV.show_to(scheduler)
    return step, budget, left_out


def _may_rest(ours: Admission, scheduler: Any, running: Any) -> bool:
    """Return whether decodes of batches may be left out of the step.

    Where the KV cache might not do for all, SGLang has to see them: it retracts them, and not online requests.
    """
    needed = ROOM * scheduler.page_size * len(running.reqs)
    return ours.overlap is not Overlap.PDMUX and ours.space.free >= needed and resting.can_rest(scheduler, running)


def _ask_scan(
    ours: Admission, scheduler: Any, running: Any, demand: Demand, allowed: Allowed, left_out: list[Any]
) -> Step:
    """Let the scan decide; to it, the prompts of online requests are admitted, and what they reserve is used."""
    continued = scheduler.chunked_req
    pending = online.uncomputed_tokens(continued) if continued in ours.running else 0
    decoding = len(running.reqs)
    reads = int(running.seq_lens_cpu.sum()) if decoding else 0
    slots = max(0, scheduler.get_num_allocatable_reqs(decoding) - (continued is not None) - demand.waiting)
    used = ours.space.capacity - ours.space.free + pending + demand.kv + demand.reserved
    used += ours.beside.kept_free
    decoding -= len(left_out)
    reads -= sum(length(req) for req in left_out)
    bursts = not ours.overlap.mixes or ours.not_mixed > 0 or running.return_logprob
    ours.scan.set_bursts(bursts)
    pending += 0 if bursts else demand.tokens  # an online prompt is no reason for a whole step of ours
    slots = min(slots, ours.space.windows)
    now, may_follow = ours.ranks.now, ours.ranks.are_ready
    return ours.scan.decide(used, reads, decoding, pending, ours.decoded, slots, now, may_follow, allowed.most)


def _make_way(ours: Admission, scheduler: Any, budget: int, tokens: int, most: int) -> int:
    """Park the chunked prefill of one of our requests if it leaves fewer than `tokens`: SGLang computes it first.

    Returns the budget of the step, which is larger, up to `most`, if the chunk cannot be parked.
    """
    continued = scheduler.chunked_req
    if continued not in ours.running:
        return budget
    beside = online.uncomputed_tokens(continued) + tokens
    if beside <= budget:
        return budget
    if not (ours.may_park(continued) and preemption.can_park(scheduler)):
        return min(beside, most)
    computed = len(continued.prefix_indices)
    with ours.copies.following():
        parked = preemption.park(scheduler)
    ours.park(parked, computed)
    return budget


def _make_room(ours: Admission, scheduler: Any, running: Any, demand: Demand) -> None:
    """Take requests of batches off the engine until online prompts find room in the KV cache, and a request slot.

    They are the one that is being computed, whose next chunk SGLang takes whether there is room or not, and the first
    that waits. One at least is admitted in each step, so what is taken off is no more than they need.
    """
    if not preemption.can_take_off(scheduler):
        return
    continued = scheduler.chunked_req
    must = continued is not None and continued not in ours.running
    wanted = demand.first + len(running.reqs) + scheduler.page_size + 1
    wanted += online.uncomputed_tokens(continued) if continued in ours.running else 0
    gone: list[Any] = []

    def free() -> int:
        return ours.space.free + ours.copies.leaving_tokens

    def is_short() -> bool:
        slots = scheduler.get_num_allocatable_reqs(len(running.reqs) - len(gone)) - (continued is not None)
        return free() < wanted or (demand.waiting > 0 and slots < 1)

    if is_short():
        those = ours.victims(running, must)
        if not must and free() + sum(length(req) for req in those) < wanted:
            return  # nobody leaves for what would not help
        for req in those:
            if not is_short():
                break
            with ours.copies.following():
                preemption.release(scheduler, req)
            gone.append(req)
        preemption.leave(running, gone)
        ours.take_off(gone)
    if must and ours.space.free < wanted:
        ours.copies.finish()


def abort(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> None:
    """Show SGLang the waiting requests that an abort means, and all that decode; it takes them out itself."""
    ours = admission_of(scheduler)
    scheduler.running_batch = _all_decodes(ours, scheduler.running_batch)

    def unbegun() -> dict[str, Any]:  # one that was parked has computed a part of its prompt
        return {rid: member.req for rid, member in ours.waiting.items() if not member.computed}

    for each in withdrawals.aborts_for(recv_req, unbegun):
        scheduler.waiting_queue = [*scheduler.waiting_queue, *ours.take_back(each.rid, each.abort_all)]
        original(scheduler, each)


def pause(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """Show SGLang all that decode: it may retract them."""
    scheduler.running_batch = _all_decodes(admission_of(scheduler), scheduler.running_batch)
    return original(scheduler, recv_req)


def is_fully_idle(original: Callable[..., bool], scheduler: Any, *args: Any, **kwargs: Any) -> bool:
    """Return whether SGLang is idle and none of our requests waits or rests."""
    ours = admission_of(scheduler)
    return original(scheduler, *args, **kwargs) and not ours.waiting and ours.resting is None


HOOKS = [
    (f"{_SCHEDULER}._add_request_to_queue", enqueue, HookType.AROUND),
    (f"{_SCHEDULER}.get_next_batch_to_run", begin_step, HookType.AROUND),
    (f"{_SCHEDULER}._get_new_batch_prefill_raw", admit, HookType.AROUND),
    (f"{_SCHEDULER}.abort_request", abort, HookType.AROUND),
    (f"{_SCHEDULER}.pause_generation", pause, HookType.AROUND),
    (f"{_SCHEDULER}.is_fully_idle", is_fully_idle, HookType.AROUND),
    *adder_hooks.HOOKS,
    *host_copies.HOOKS,
    *online.HOOKS,
    *resting.HOOKS,
]
