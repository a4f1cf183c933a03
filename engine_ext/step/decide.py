"""Decides a step: online requests first, the limit, who rests, the scan, who parks, and room, in this order.

It takes what an engine showed (`view.py`), what is remembered (`memory.py`) and the scan's state, and says what the
step does (`plan.py`). It touches no engine: SGLang's and the simulated one carry the plan out, each in its own way.
"""

from typing import NamedTuple

import numpy as np

from engine_ext.arrays import Bools
from engine_ext.compiled import brief, compiled
from engine_ext.coserve.governor import governed
from engine_ext.coserve.harvest import harvest
from engine_ext.coserve.limit import NOT_PROFILED, step_limit, while_prompts_wait
from engine_ext.coserve.predictor import Load, longest_chunk, predict, with_chunk, with_decodes, with_margin
from engine_ext.coserve.tuning import LEAST_CHUNK
from engine_ext.scan.decide import ANY_NUMBER, next_of
from engine_ext.scan.decide import decide as ask_scan
from engine_ext.scan.state import LEFT, RIGHT, State
from engine_ext.scan.sweep import has_drifted, waiting
from engine_ext.step.memory import Memory
from engine_ext.step.plan import Room, StepPlan
from engine_ext.step.tuning import OWED_CHUNKS, ROOM_PAGES
from engine_ext.step.view import View


class Share(NamedTuple):
    """How a step is divided: the `online` prompt tokens, and the `most` of all.

    `limit_s`, `is_cut`: as in `StepPlan`.
    """

    online: int
    most: int
    limit_s: float
    is_cut: bool


class After(NamedTuple):
    """What the scan says after a decision: how many wait, whether its work has drifted, and the next of both ends."""

    waiting: int
    has_drifted: bool
    left: int
    right: int


@brief
def decide(state: State, memory: Memory, view: View, rests: Bools) -> tuple[StepPlan, After]:
    """Decide the step, and write into `rests`, bool [decodes of `view.kv`], who is left out of it.

    The admitted requests count as admitted from here on; they are the first ones of `state.admitted`. What the scan is
    asked afterwards comes with the plan, because each call of machine code takes time.
    """
    rests[:] = False
    free = int(state.costs.capacity) - view.used
    divided, in_vain = Share(view.online.tokens, ANY_NUMBER, np.inf, False), bool(memory.in_vain[0])
    if view.is_limited:
        # Where the KV cache might not do for all, an engine has to see them: it retracts them, and not online requests.
        divided = share(memory, view, rests, free >= ROOM_PAGES * view.page * view.decoding)
    budget, admitted, left_out = _scan(state, view, divided, rests)
    budget, parks, yields = _way(view, max(budget, divided.online), divided.online, free, in_vain)
    room, is_cut = _room(view, parks), bool(divided.is_cut)
    plan = StepPlan(budget, admitted, left_out, parks, yields, room, float(divided.limit_s), is_cut)
    return plan, After(waiting(state), has_drifted(state), next_of(state, LEFT), next_of(state, RIGHT))


@compiled
def share(memory: Memory, view: View, rests: Bools, may_rest: bool) -> Share:
    """Divide the step: the online prompts have what they need within their bounds, and batches what then is left.

    `may_rest`: whether decodes of batches may be left out.
    """
    needs, due = view.online, 0 if memory.in_vain[0] else view.online.due
    memory.in_vain[0] = needs.prompts > 0
    able = len(view.kv) if may_rest else 0
    fixed = view.fixed if may_rest else with_decodes(view.fixed, len(view.kv), int(view.kv.sum()))
    online = _online_tokens(memory, view, fixed)
    load = with_chunk(fixed, needs.before, online) if online > 0 else fixed
    limit_s = _limit(memory, view, load, online, due)
    before = view.chunk.computed if view.chunk.is_ours else 0
    kv, skipped, most = view.kv[:able], view.skipped[:able], max(0, view.largest - online)
    found = harvest(memory.predictor, load, kv, skipped, rests[:able], limit_s, before, most)
    tokens = found.prompt_tokens
    if needs.decoding + due == 0:  # nobody waits for this step; a limit that no step can keep must not end batches
        tokens = max(tokens, LEAST_CHUNK)
        if found.left_out == len(rests):
            rests[:] = False
    is_cut, chunk = tokens < view.largest - online, view.largest // OWED_CHUNKS
    if tokens < chunk and _is_owed(memory, chunk, before):
        tokens = chunk
        rests[:] = False
    return Share(online, online + tokens, limit_s, is_cut)


@compiled
def _online_tokens(memory: Memory, view: View, fixed: Load) -> int:
    """Return the step's tokens of online prompts: as many as end before the next token of one that decodes is due.

    `fixed`: the decodes that are in the step in any case.
    """
    needs = view.online
    if needs.tokens == 0:
        return 0
    alone_s = predict(memory.predictor, fixed)
    profiled = memory.profiled if memory.profiled.cuts_prompts else NOT_PROFILED
    limit_s = step_limit(view.bounds, profiled, needs.slack_s, alone_s, needs.decoding, False)
    fitting = longest_chunk(memory.predictor, fixed, needs.before, limit_s, needs.tokens)
    return min(needs.tokens, max(fitting, LEAST_CHUNK))


@compiled
def _limit(memory: Memory, view: View, load: Load, online: int, due: int) -> float:
    """Return the most seconds of a step with work of batches beside `load`, in which `due` online prompts wait."""
    needs, alone_s = view.online, predict(memory.predictor, load)
    rest = max(0, needs.due_tokens - online) if due > 0 else 0
    slack_s = needs.slack_s
    if rest > 0:
        slack_s = min(slack_s, while_prompts_wait(alone_s, needs.first_slack_s, rest, online))
    limit_s = step_limit(view.bounds, memory.profiled, slack_s, alone_s, needs.decoding + due, due > 0)
    return governed(memory.governor, limit_s, with_margin(memory.predictor, load))


@compiled
def _is_owed(memory: Memory, chunk: int, before: int) -> bool:
    """Return whether the batches' least part of the time pays for a chunk of a prompt with `before` computed tokens."""
    if memory.least_share == 0.0:
        return False
    cost_s = predict(memory.predictor, Load(chunk, float(chunk) * (chunk + 2 * before), 1, 0, 0))
    return bool(memory.owed_s[0] >= cost_s)  # `note_launch` notes what they get


@compiled
def _scan(state: State, view: View, divided: Share, rests: Bools) -> tuple[int, int, int]:
    """Let the scan decide; to it, the prompts of online requests are admitted, and what they reserve is used.

    Returns its budget, how many requests it admits, and how many decodes are left out.
    """
    needs, pending = view.online, view.chunk.left if view.chunk.is_ours else 0
    used = view.used + pending + needs.kv + needs.reserved + view.kept_free
    left_out, reads = 0, view.reads
    for k in range(len(rests)):
        if rests[k]:
            left_out += 1
            reads -= view.kv[k]
    if view.mixes:  # else an online prompt is no reason for a whole step of ours
        pending += needs.tokens
    budget, admitted = ask_scan(
        state, used, reads, view.decoding - left_out, pending, view.decoded, view.slots, divided.most
    )
    return budget, admitted, left_out


@compiled
def _way(view: View, budget: int, online: int, free: int, in_vain: bool) -> tuple[int, bool, bool]:
    """Return the step's budget, and whether our prompt in chunks is parked, or yields: the engine computes it first.

    If it leaves fewer than `online` tokens to prompts that wait, it yields these where they end by that; an engine has
    one prompt in chunks at a time. Else it makes way, also where none of them came in with the last step (`in_vain`).
    If it may not, the step is longer. Where no KV token is free beside those that others need next, SGLang would take
    its whole chunk, and fail.
    """
    chunk = view.chunk
    if not chunk.is_ours or chunk.left == 0:
        return budget, False, False
    if chunk.can_park and free <= view.decoding + view.online.reserved + view.page:
        return budget, True, False
    if view.online.waiting == 0 or chunk.left + online <= budget:
        return budget, False, False
    fits = free >= view.online.first + view.decoding + view.page + 1 + chunk.left
    if chunk.can_yield and fits and not in_vain and online == view.online.tokens and budget - online >= view.page:
        return budget, False, True
    return (budget, True, False) if chunk.may_park else (min(chunk.left + online, view.largest), False, False)


@compiled
def _room(view: View, parks: bool) -> Room:
    """Return what online prompts need.

    Room is made for the prompt that is being computed, whose next chunk the engine takes whether there is room or not,
    and for the first that waits. That one is admitted in this step, so no more is taken off than is needed.
    """
    if view.online.prompts == 0:
        return Room(0, False, False)
    tokens, chunk = view.online.first + view.decoding + view.page + 1, view.chunk
    if chunk.is_ours and not parks:
        tokens += chunk.left
    return Room(tokens, view.online.waiting > 0, chunk.left > 0 and not chunk.is_ours)
