"""Simulates our scheduler for online requests beside a batch: a loop of observe, decide, apply and run."""

import numpy as np

from engine_ext.arrays import Bools, Column
from engine_ext.compiled import compiled
from engine_ext.coserve.governor import Moment, note_served, served
from engine_ext.coserve.reserve import note_online_kv
from engine_ext.scan.books import finished, left_out, prefilled, retracted
from engine_ext.scan.replan import is_outdated
from engine_ext.scan.state import State
from engine_ext.scan.sweep import has_drifted, waiting
from engine_ext.simulate.apply import apply
from engine_ext.simulate.cache import Cache, evictable_leaves
from engine_ext.simulate.line import ARRIVED, DRAIN, Line, arrive, put_back_online, wait
from engine_ext.simulate.observe import look
from engine_ext.simulate.ours import Ours, Rules, bounds_of
from engine_ext.simulate.reservation import adapt
from engine_ext.simulate.shared_engine import DONE, PREFILL, SharedEngine, note_generated, run_step
from engine_ext.step.decide import decide
from engine_ext.step.memory import learn, note_launch


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
            ours.arrived_excess_s[request] = ours.memory.governor.excess_s[0] - part * last_excess_s
        view = look(engine, cache, line, ours, rules, first_online)
        plan, _ = decide(state, ours.memory, view, ours.rests[: len(view.kv)])
        ours.decoded[0] = 0
        theirs = apply(engine, cache, heap, state, line, ours, view, plan, first_online)
        load = run_step(engine, cache, heap, rules.model, True, True)
        note_launch(ours.memory, load, theirs)
        if load.prompt_tokens + load.decoding == 0:
            has_left = totals.preempted > 0
            answers -= _tell(engine, state, line)
            if has_left:
                continue
            before_s = totals.now_s
            if not wait(engine, line, first_online, until_s, np.inf):
                break
            note_online_kv(ours.memory.held, totals.online_locked, totals.now_s - before_s)
            continue
        if load.decoding > 0:
            _tell_left_out(engine, state)
        excess_s = ours.memory.governor.excess_s[0]
        learn(ours.memory, load, theirs, totals.last_step_s)
        last_excess_s = ours.memory.governor.excess_s[0] - excess_s
        _note_online(engine, ours, rules)
        note_online_kv(ours.memory.held, totals.online_locked, totals.last_step_s)
        adapt(engine, ours.ratio, rules.reserved, load.decoding if load.prompt_tokens == 0 else 0)
        answers -= _tell(engine, state, line)
        ours.decoded[0] = 1 if load.decoding > 0 else 0
    note_generated(engine, np.inf, until_s)
    return True


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
    totals, excess_s = engine.totals[0], ours.memory.governor.excess_s[0]
    for k in range(totals.prefilled):
        request = int(engine.prefilled[k])
        if engine.requests[request].online == 1 and engine.requests[request].generated == 1:
            ours.first_excess_s[request] = excess_s
    for k in range(totals.finished):
        request = int(engine.finished[k])
        r = engine.requests[request]
        if r.online == 1 and not rules.may_wait[r.slo]:
            arrived = Moment(r.arrives_s, ours.arrived_excess_s[request])
            first = Moment(r.first_s, ours.first_excess_s[request])
            found = served(arrived, first, Moment(r.last_s, excess_s), r.output)
            bounds, percentile = bounds_of(rules, int(r.slo)), rules.percentiles[r.slo]
            note_served(ours.memory.governor, bounds, percentile, found, totals.now_s)


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
