"""Writes down each step of a real scheduler: what it held, what was decided, and what became of it.

It runs in the scheduler's process alone, where it puts itself between the parts of a step.
"""

import os
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from engine_ext.plugin.scheduler import admission_hooks, observe
from engine_ext.plugin.scheduler.admission import Admission
from engine_ext.plugin.scheduler.online import is_ours
from engine_ext.plugin.scheduler.radix import cached_tokens
from engine_ext.scan.state import State
from engine_ext.step import live
from engine_ext.step.memory import Memory
from engine_ext.step.plan import StepPlan
from engine_ext.step.view import View
from tests.engine.step.frames import RECORD, Frame, Held

_frame: Frame | None = None
_ours: Admission | None = None


def _held(ours: Admission, scheduler: Any, req: Any, is_on_engine: bool) -> Held:
    member, pace = ours.running.get(req) or ours.waiting.get(req.rid), ours.beside.paces.get(req)
    cached = len(req.prefix_indices) if is_on_engine else _cached(scheduler, req)
    found = Held(is_ours(req), req.to_finish is not None, len(req.output_ids), cached)
    if member is not None:
        found.skipped, found.made_way = member.skipped, member.taken_off
    if pace is not None:
        found.times = pace.arrived_s, pace.first_s, pace.last_s
    return found


def _cached(scheduler: Any, req: Any) -> int:
    ids = req.origin_input_ids + req.output_ids
    everything = SimpleNamespace(origin_input_ids=ids, extra_key=req.extra_key, return_logprob=False)
    return cached_tokens(scheduler.tree_cache, everything, touches=False).on_device


def _look(ours: Admission, scheduler: Any, running: Any) -> Any:
    global _frame, _ours
    seen, chunked = _real_look(ours, scheduler, running), scheduler.chunked_req
    _ours = ours
    on_engine = [*running.reqs, *([] if chunked is None else [chunked])]
    waits = [*scheduler.waiting_queue, *(member.req for member in ours.waiting.values())]
    held = {req.rid: _held(ours, scheduler, req, is_on_engine=True) for req in on_engine}
    held |= {req.rid: _held(ours, scheduler, req, is_on_engine=False) for req in waits}
    _frame = Frame(
        seen.view,
        seen.now,
        float(scheduler.new_token_ratio_tracker.current),
        ours.decoded,
        held,
        [req.rid for req in running.reqs if not req.finished()],
        None if chunked is None else chunked.rid,
        [req.rid for req in scheduler.waiting_queue],
    )
    return seen


def _decide(state: State, memory: Memory, view: View, rests: Any) -> Any:
    assert _frame is not None
    assert _ours is not None
    keys = [_ours.scan.key_of(place) for place in range(len(state.requests))]
    _frame.places = [None if key is None or key not in _ours.by_key else _ours.by_key[key].req.rid for key in keys]
    _frame.state, _frame.memory = pickle.loads(pickle.dumps((state, memory)))
    found = _real_decide(state, memory, view, rests)
    _frame.plan = found[0]
    return found


def _apply(
    ours: Admission,
    scheduler: Any,
    running: Any,
    view: View,
    plan: StepPlan,
    admitted: list[int],
    rests: list[Any],
    ask_sglang: Callable[[], Any],
) -> Any:
    frame = _frame
    assert frame is not None

    def ask() -> Any:
        frame.is_asked = True
        return ask_sglang()

    frame.admitted = [ours.by_key[key].req.rid for key in admitted]
    done = _real_apply(ours, scheduler, running, view, plan, admitted, rests, ask)
    frame.rests, frame.made_way = [req.rid for req in done.rests], [req.rid for req in ours.made_way]
    if done.batch is not None:
        riding = set(done.batch.decoding_reqs or [])
        frame.computed = {
            req.rid: int(size)
            for req, size in zip(done.batch.reqs, done.batch.extend_lens, strict=True)
            if req not in riding
        }
    with open(os.environ[RECORD], "ab") as file:
        pickle.dump(frame, file)
    return done


_real_look, _real_decide, _real_apply = observe.look, live.decide, admission_hooks.apply
observe.look, live.decide, admission_hooks.apply = _look, _decide, _apply
HOOKS: list[tuple[str, Callable[..., Any], HookType]] = []
