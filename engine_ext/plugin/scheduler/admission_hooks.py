"""Brings the dual scan's admissions into SGLang's scheduler, by wrapping functions of it.

In each step, `admit` observes what the engine holds (`observe.py`), lets `step/` decide, and applies the plan: SGLang
sees the requests that the scan admits, in its order, and as many prompt tokens as the plan has (`apply.py`).
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from sglang.srt.plugins.hook_registry import HookType

from engine_ext.plugin.options import Overlap
from engine_ext.plugin.scheduler import (
    adder_hooks,
    foresight,
    host_copies,
    observe,
    online,
    pulse_hooks,
    resting,
    withdrawals,
)
from engine_ext.plugin.scheduler.admission import Admission, admission_of
from engine_ext.plugin.scheduler.apply import Done, apply
from engine_ext.plugin.scheduler.online import is_ours
from engine_ext.plugin.scheduler.step_load import load_of, load_of_decodes

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
        ours.figures.note_time(time.perf_counter() - started, is_step=False)


def begin_step(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Show SGLang all that decode, with those that the last step left out, and without those that have ended."""
    if "running_batch" in kwargs:  # else it is no loop of an engine that the scan drives
        ours = admission_of(scheduler)
        kwargs["running_batch"] = running = _all_decodes(ours, kwargs["running_batch"])
        if (ours.waiting or ours.running) and ours.overlap is not Overlap.PDMUX:  # there they decode while SGLang asks
            _drop_ended(running)
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
        ours.figures.note_time(time.perf_counter() - started - theirs_s)
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
    ours.turns.look_again(scheduler.waiting_queue, running)
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
    """Note what the last step did, look, decide, apply."""
    is_beside = ours.overlap is Overlap.PDMUX  # decodes continue during a prefill, and SGLang asks between prefills
    changed = _note_last_step(ours, scheduler, running, is_beside)
    seen = observe.look(ours, scheduler, running)
    plan, admitted = ours.scan.decide(ours.beside.memory, seen.view, seen.rests, seen.now, ours.ranks.are_ready)
    ours.beside.decided(plan)
    if is_beside:  # they decode from here on; tokens decoded during their prefill were not theirs
        ours.prefilled(None)
    rests = [seen.able[place] for place in np.flatnonzero(seen.rests)]
    done = apply(ours, scheduler, running, seen.view, plan, admitted, rests, ask_sglang)
    ours.steps += 1
    ours.decoded = 0 if is_beside else 1
    if done.batch is not None and not is_beside:
        ours.prefilled(scheduler.chunked_req)
        ours.decoded = int(done.batch.decoding_reqs is not None)
    changed |= done.batch is not None
    ours.keep_prefixes(changed, scheduler.chunked_req, plan.room.tokens, seen.view.decoding)
    return done.batch, _note_step(ours, done)


def _note_last_step(ours: Admission, scheduler: Any, running: Any, is_beside: bool) -> bool:
    """Note what has ended and what is in the cache now; return whether any request has ended."""
    ours.copies.begin_step()
    changed = ours.notice_ends(running.reqs, scheduler.chunked_req)
    ours.notice_stored()
    if is_beside:
        ours.store_all()
    if not ours.running:
        ours.pins.release()
    return changed


def _drop_ended(running: Any) -> None:
    """Take those that have ended out of the batch that decodes; SGLang does so after it has chosen the prompts."""
    before = len(running.reqs)
    running.filter_batch()
    if len(running.reqs) < before:
        running.batch_is_full = False


def _note_step(ours: Admission, done: Done) -> Any:
    """Note the step that is launched now, and return what decodes, with those who rest if nothing else is done."""
    running, rests = done.running, done.rests
    if done.batch is None and running.is_empty():
        running, rests = _all_decodes(ours, running), []
    _note_launch(ours, done.batch, running)
    ours.note_left_out(rests, running.reqs if done.batch is None else done.batch.decoding_reqs or [])
    return running


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
