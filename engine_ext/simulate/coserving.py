"""Simulates our scheduler for online requests beside a batch: the dual scan within the limits of `coserve`."""

from typing import NamedTuple

import numpy as np

from engine_ext.arrays import Bools, Column, Floats
from engine_ext.compiled import compiled
from engine_ext.coserve.governor import Governor, Moment, note_served, served
from engine_ext.coserve.harvest import harvest
from engine_ext.coserve.limit import NOT_PROFILED, PAGE, Profiled, step_limit
from engine_ext.coserve.predictor import Load, Predictor, longest_chunk, predict, with_chunk
from engine_ext.coserve.reserve import OnlineKv, note_online_kv, reserve
from engine_ext.coserve.slo import Bounds, deadline
from engine_ext.coserve.step import Delayed, batches_limit, learn
from engine_ext.coserve.victims import victims
from engine_ext.costs.engine_model import StepModel
from engine_ext.scan.books import finished, left_out, prefilled, retracted
from engine_ext.scan.decide import decide
from engine_ext.scan.replan import is_outdated
from engine_ext.scan.state import State
from engine_ext.scan.sweep import has_drifted, waiting
from engine_ext.simulate.cache import Cache, Heap, evictable_leaves
from engine_ext.simulate.line import ARRIVED, DRAIN, Line, arrive, next_online, put_back_online, taken, wait
from engine_ext.simulate.shared_engine import (
    DONE,
    NOBODY,
    PREFILL,
    SharedEngine,
    admit,
    needed,
    note_generated,
    room,
    run_step,
    take_off,
)

AHEAD_S = 0.1


class Rules(NamedTuple):
    """Our settings: the online class's bounds, what was profiled, and the most prompt tokens of a step.

    `percentile`: the share of online requests that must keep the bounds. `model`: how long steps really take; what the
    predictor starts from may be wrong.
    """

    bounds: Bounds
    percentile: float
    profiled: Profiled
    chunk: int
    model: StepModel


class Ours(NamedTuple):
    """What our scheduler knows beside the scan's state; arrays that change in place.

    `kv`, `skipped`, `rests`, `batch`: by decode of the batch. `decoded`: output tokens of each decode that the scan has
    not been told. `arrived_excess_s`, `first_excess_s`: the seconds by which batches had made steps longer when each
    online request came, and at its first token; float64 [requests]. `ahead`: the most KV tokens that online requests
    will hold within a second, by steps of AHEAD_S; empty for a scheduler that cannot know.
    """

    predictor: Predictor
    governor: Governor
    held: OnlineKv
    kv: Column
    skipped: Column
    batch: Column
    rests: Bools
    decoded: Column
    arrived_excess_s: Floats
    first_excess_s: Floats
    ahead: Column


@compiled
def run_ours(
    engine: SharedEngine,
    cache: Cache,
    state: State,
    line: Line,
    ours: Ours,
    rules: Rules,
    answers: int,
    more: bool,
    until_s: float,
) -> bool:
    """Run until everything has ended, and return True, or until another plan is due.

    `more`: whether the batch has requests that come when those of the plan have ended.
    """
    heap, totals, requests = evictable_leaves(cache), engine.totals[0], engine.requests
    first_online = len(state.requests)
    online, steps, last_excess_s = len(requests) - first_online, 0, 0.0
    while totals.now_s < until_s or (totals.done < online and totals.now_s < DRAIN * until_s):
        note_generated(engine, totals.now_s, until_s)
        if is_outdated(waiting(state), has_drifted(state), steps, answers):
            return False
        if more and state.totals[0].running + waiting(state) == 0:
            return False
        steps += 1
        first_new = first_online + line.at[ARRIVED]
        arrive(engine, line, first_online)
        for request in range(first_new, first_online + line.at[ARRIVED]):
            late_s = min(totals.now_s - engine.requests[request].arrives_s, totals.last_step_s)
            part = late_s / totals.last_step_s if totals.last_step_s > 0 else 0.0  # of the last step, which delays it
            ours.arrived_excess_s[request] = ours.governor.excess_s[0] - part * last_excess_s
        theirs = _choose(engine, cache, heap, state, line, ours, rules, first_online)
        load = run_step(engine, cache, heap, rules.model, True, True)
        if load.prompt_tokens + load.decoding == 0:
            before_s = totals.now_s
            if not wait(engine, line, first_online, until_s, np.inf):
                break
            note_online_kv(ours.held, totals.online_locked, totals.now_s - before_s)
            continue
        if load.decoding > 0:
            _tell_left_out(engine, state)
        excess_s = ours.governor.excess_s[0]
        learn(ours.predictor, ours.governor, load, theirs, totals.last_step_s)
        last_excess_s = ours.governor.excess_s[0] - excess_s
        _note_online(engine, ours, rules)
        note_online_kv(ours.held, totals.online_locked, totals.last_step_s)
        answers -= _tell(engine, state, line)
        ours.decoded[0] = 1 if load.decoding > 0 else 0
    note_generated(engine, np.inf, until_s)
    return True


@compiled
def _choose(
    engine: SharedEngine,
    cache: Cache,
    heap: Heap,
    state: State,
    line: Line,
    ours: Ours,
    rules: Rules,
    first_online: int,
) -> Load:
    """Say what the next step does: online requests first, then the batch within the step's limit.

    Returns the online work of the step.
    """
    totals, predictor = engine.totals[0], ours.predictor
    load = Load(0, 0.0, 0, totals.online_decoding, totals.online_kv)
    slack_s = _least_slack(engine, rules.bounds)
    alone_s = predict(predictor, load)
    limit_s = step_limit(rules.bounds, NOT_PROFILED, slack_s, alone_s, totals.online_decoding, False)
    load, first_slack_s, rest = _online_prompts(engine, cache, heap, state, line, ours, rules, first_online, limit_s)
    online, has_prompts = totals.online_decoding + load.prompts, load.prompts > 0 or rest > 0
    delayed = Delayed(online, has_prompts, slack_s, first_slack_s, rest, rules.chunk)
    limit_s = batches_limit(predictor, ours.governor, rules.bounds, rules.profiled, load, delayed)
    _batch(engine, cache, heap, state, line, ours, rules, load, limit_s)
    return load


@compiled
def _least_slack(engine: SharedEngine, bounds: Bounds) -> float:
    """Return the least seconds until the next token of an online request that decodes is due."""
    totals, least = engine.totals[0], np.inf
    for k in range(totals.decoding):
        r = engine.requests[engine.decoding[k]]
        if r.online == 1:
            due = deadline(bounds, r.arrives_s, r.first_s, r.last_s, r.generated)
            least = min(least, due - totals.now_s)
    return least


@compiled
def _online_prompts(
    engine: SharedEngine,
    cache: Cache,
    heap: Heap,
    state: State,
    line: Line,
    ours: Ours,
    rules: Rules,
    first_online: int,
    limit_s: float,
) -> tuple[Load, float, int]:
    """Give online prompts their part of the step, in order of arrival, which is that of their slack in one class.

    Returns the load of the step's online work, the least slack of the prompts that it leaves unfinished, and how many
    tokens of these are left.
    """
    totals, requests = engine.totals[0], engine.requests
    load = Load(0, 0.0, 0, totals.online_decoding, totals.online_kv)
    left, slack_s, rest = rules.chunk, np.inf, 0
    at = 0
    while True:
        if at < totals.prefilling:
            request = int(engine.prefilling[at])
            at += 1
            if requests[request].online == 0:
                continue
        else:
            request = next_online(line, first_online)
            if request == NOBODY:
                break
            if left <= 0 or not _make_room_for(engine, cache, heap, state, request):
                rest += int(requests[request].prompt)
                slack_s = min(slack_s, _slack_of(engine, rules, request))
                break
            taken(engine, line, request)
            admit(engine, cache, heap, request)
            at = totals.prefilling
        r = requests[request]
        before = int(r.prompt + r.generated - r.left)
        most = int(min(left, r.left))
        fitting = longest_chunk(ours.predictor, load, before, limit_s, most)
        r.take = min(most, max(fitting, PAGE if load.prompts == 0 else 0))
        left = left - r.take if fitting == most else 0
        if r.take > 0:
            load = with_chunk(load, before, int(r.take))
        if r.take < r.left:
            rest += int(r.left - r.take)
            slack_s = min(slack_s, _slack_of(engine, rules, request))
    return load, slack_s, rest


@compiled
def _slack_of(engine: SharedEngine, rules: Rules, request: int) -> float:
    r = engine.requests[request]
    due = deadline(rules.bounds, r.arrives_s, r.first_s, r.last_s, r.generated)
    return float(due - engine.totals[0].now_s)


@compiled
def _make_room_for(engine: SharedEngine, cache: Cache, heap: Heap, state: State, request: int) -> bool:
    """Return whether there is room for an online request, for which requests of the batch leave the engine."""
    while room(engine, cache) - needed(engine, cache, request) <= 0:
        those = victims(state)
        victim = int(those[0]) if len(those) > 0 else _last_prompt(engine)
        if victim == NOBODY:
            return False
        take_off(engine, cache, heap, victim, True)
        engine.totals[0].preempted = 0
        retracted(state, victim, int(engine.requests[victim].generated))
    return True


@compiled
def _last_prompt(engine: SharedEngine) -> int:
    """Return the request of the batch whose prompt was begun last."""
    for k in range(engine.totals[0].prefilling - 1, -1, -1):
        request = int(engine.prefilling[k])
        if engine.requests[request].online == 0:
            return request
    return NOBODY


@compiled
def _batch(
    engine: SharedEngine,
    cache: Cache,
    heap: Heap,
    state: State,
    line: Line,
    ours: Ours,
    rules: Rules,
    load: Load,
    limit_s: float,
) -> None:
    """Say what the step does for the batch: which decodes it leaves out, what it computes, which requests it admits."""
    totals, requests = engine.totals[0], engine.requests
    count, pending, before = _note_batch(engine, ours)
    most = max(0, rules.chunk - load.prompt_tokens)
    rests = ours.rests[:count]
    found = harvest(ours.predictor, load, ours.kv[:count], ours.skipped[:count], rests, limit_s, before, most)
    left_out, kv = found.left_out, 0
    if left_out == count and load.prompts + load.decoding == 0:  # a limit that no step can keep must not end the batch
        rests[:] = False
        left_out = 0
    for k in range(count):
        requests[ours.batch[k]].rests = 1 if rests[k] else 0
        kv += 0 if rests[k] else ours.kv[k]
    budget, admitted = decide(
        state,
        cache.tokens[0].locked + _kept_free(ours, totals.online_locked, totals.now_s),
        load.kv_tokens + kv,
        load.decoding + count - left_out,
        pending + load.prompt_tokens,
        int(ours.decoded[0]),
        len(requests),
        load.prompt_tokens + found.prompt_tokens,
    )
    ours.decoded[0] = 0
    for k in range(admitted):
        request = int(state.admitted[k])
        if room(engine, cache) - needed(engine, cache, request) <= 0:
            retracted(state, request, int(requests[request].generated))
        else:
            admit(engine, cache, heap, request)
    left = max(0, min(budget - load.prompt_tokens, found.prompt_tokens))
    for k in range(totals.prefilling):
        r = requests[engine.prefilling[k]]
        if r.online == 0:
            r.take = min(left, r.left)
            left -= r.take


@compiled
def _kept_free(ours: Ours, locked: int, now_s: float) -> int:
    """Return the KV tokens to keep free for online requests, which have locked so many now."""
    if len(ours.ahead) == 0:
        return reserve(ours.held)
    return max(0, int(ours.ahead[min(int(now_s / AHEAD_S), len(ours.ahead) - 1)]) - locked)


@compiled
def _note_batch(engine: SharedEngine, ours: Ours) -> tuple[int, int, int]:
    """Note the batch's decodes in `ours`; return how many there are, and what its prompts still have to compute.

    The last number is how many tokens of the first of these prompts are computed.
    """
    totals, count, pending, before = engine.totals[0], 0, 0, 0
    for k in range(totals.decoding):
        r = engine.requests[engine.decoding[k]]
        if r.online == 0:
            ours.batch[count], ours.kv[count], ours.skipped[count] = (
                engine.decoding[k],
                r.prompt + r.generated,
                r.skipped,
            )
            count += 1
    for k in range(totals.prefilling - 1, -1, -1):
        r = engine.requests[engine.prefilling[k]]
        if r.online == 0:
            pending += r.left
            before = r.prompt + r.generated - r.left
    return count, int(pending), int(before)


@compiled
def _tell_left_out(engine: SharedEngine, state: State) -> None:
    """Tell the scan which of the batch's decodes got no token in a step in which others did."""
    for k in range(engine.totals[0].decoding):
        request = int(engine.decoding[k])
        if engine.requests[request].online == 0 and engine.requests[request].rests == 1:
            left_out(state, request, 1)


@compiled
def _tell(engine: SharedEngine, state: State, line: Line) -> int:
    """Tell the scan what the step did to the batch's requests; return how many answers of unknown length have ended."""
    totals, learned = engine.totals[0], 0
    for k in range(totals.preempted):
        request = int(engine.preempted[k])
        if engine.requests[request].online == 0:
            retracted(state, request, int(engine.requests[request].generated))
    put_back_online(engine, line)
    for k in range(totals.prefilled):
        if engine.requests[engine.prefilled[k]].online == 0:
            prefilled(state, int(engine.prefilled[k]))
    for k in range(totals.finished):
        request = int(engine.finished[k])
        if engine.requests[request].online == 0:
            finished(state, request, int(engine.requests[request].output))
            learned += state.requests[request].known < 0
    return learned


@compiled
def _note_online(engine: SharedEngine, ours: Ours, rules: Rules) -> None:
    """Note how the step served online requests: who has got the first token, and who has ended."""
    totals, excess_s = engine.totals[0], ours.governor.excess_s[0]
    for k in range(totals.prefilled):
        request = int(engine.prefilled[k])
        if engine.requests[request].online == 1 and engine.requests[request].generated == 1:
            ours.first_excess_s[request] = excess_s
    for k in range(totals.finished):
        request = int(engine.finished[k])
        r = engine.requests[request]
        if r.online == 1:
            arrived = Moment(r.arrives_s, ours.arrived_excess_s[request])
            first = Moment(r.first_s, ours.first_excess_s[request])
            found = served(arrived, first, Moment(r.last_s, excess_s), r.output)
            note_served(ours.governor, rules.bounds, rules.percentile, found, totals.now_s)


@compiled
def progress_of(engine: SharedEngine, batch: int) -> tuple[Column, Bools, Bools, Bools]:
    """Return the tokens of the batch's requests, and whether each runs, is prefilled, and has ended."""
    tokens = np.zeros(batch, dtype=np.int64)
    runs, is_prefilled, ended = np.zeros(batch, np.bool_), np.zeros(batch, np.bool_), np.zeros(batch, np.bool_)
    for request in range(batch):
        r = engine.requests[request]
        tokens[request] = r.generated
        runs[request] = r.state >= PREFILL and r.state < DONE
        is_prefilled[request] = r.state > PREFILL and r.state < DONE
        ended[request] = r.state == DONE
    return tokens, runs, is_prefilled, ended
