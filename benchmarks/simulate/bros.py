"""Simulates BROS: online requests by the time until their deadlines, then the batch, while the most urgent keep theirs.

Algorithm 1 of the paper with its adaptive batch size. Three things are kinder than there: prompts may come in chunks, a
request that is already late holds nobody up, and KV cache that was copied to the host comes back at no cost. The swap
of one online request for one of the batch, at most one a step, is left out.
"""

from typing import NamedTuple

import numpy as np

from benchmarks.simulate.rivals import make_room
from engine_ext.arrays import Column, Floats
from engine_ext.compiled import compiled
from engine_ext.coserve.predictor import Load, Predictor, predict, with_chunk, with_decodes
from engine_ext.coserve.slo import Bounds, deadline
from engine_ext.simulate.cache import Cache, Heap, empty_heap
from engine_ext.simulate.line import (
    DRAIN,
    Line,
    arrive,
    next_of_batch,
    next_online,
    put_back,
    release_group,
    taken,
    wait,
)
from engine_ext.simulate.shared_engine import (
    DECODE,
    NOBODY,
    SharedEngine,
    admit,
    needed,
    note_generated,
    room,
    run_step,
)

BASE = 128  # requests of a step, at first and after a step that would have been too long
MOST = 1 << 20


class Packing(NamedTuple):
    """Holds what BROS is set to, and how large a step may be now.

    `chunk`: prompt tokens of a step. `group`: how many of the batch's requests there are at a time; 0 for all. `size`:
    the most requests of the next step, int64 [1], changed in place.
    """

    bounds: Bounds
    chunk: int
    group: int
    size: Column


class Step(NamedTuple):
    """Describes a step that is being packed: its load, its requests, its prompt tokens, and how long it may take."""

    load: Load
    requests: int
    tokens: int
    limit_s: float


def new_packing(bounds: Bounds, chunk: int, group: int) -> Packing:
    return Packing(bounds, chunk, group, np.full(1, BASE, dtype=np.int64))


@compiled
def run_bros(
    engine: SharedEngine, cache: Cache, predictor: Predictor, line: Line, packing: Packing, batch: int, until_s: float
) -> None:
    """Run until `until_s`, and on until the online requests have ended."""
    heap, totals = empty_heap(), engine.totals[0]
    online = len(engine.requests) - batch
    while totals.now_s < until_s or (totals.done < online and totals.now_s < DRAIN * until_s):
        note_generated(engine, totals.now_s, until_s)
        arrive(engine, line, batch)
        release_group(engine, line, packing.group)
        _pack(engine, cache, heap, predictor, line, packing, batch)
        totals.preempted = 0
        load = run_step(engine, cache, heap, predictor.model, True, True)
        if load.prompt_tokens + load.decoding == 0 and not wait(engine, line, batch, until_s, np.inf):
            break
        put_back(engine, line)
    note_generated(engine, np.inf, until_s)


@compiled
def _pack(
    engine: SharedEngine,
    cache: Cache,
    heap: Heap,
    predictor: Predictor,
    line: Line,
    packing: Packing,
    batch: int,
) -> None:
    """Say what the next step does."""
    totals, requests = engine.totals[0], engine.requests
    for k in range(totals.decoding):
        requests[engine.decoding[k]].rests = 1
    here = _on_engine(engine, 1)
    residual = _residual_s(engine, packing.bounds, here)
    first, waiting_s = _first_waiting(engine, line, packing, batch)
    limit_s = waiting_s if waiting_s > 0 else np.inf
    for each in residual:
        limit_s = min(limit_s, each) if each > 0 else limit_s
    step, is_full, at = Step(Load(0, 0.0, 0, 0, 0), 0, 0, limit_s), False, 0
    order = np.argsort(residual, kind="mergesort")
    while not is_full:
        is_waiting = first != NOBODY and (at == len(here) or waiting_s < residual[order[at]])
        if is_waiting and (step.tokens >= packing.chunk or not make_room(engine, cache, heap, line, first, True)):
            is_waiting, first = False, NOBODY  # nobody who waits is admitted in this step any more
        if is_waiting:
            taken(engine, line, first)
            admit(engine, cache, heap, first, True)
            request = first
            first, waiting_s = _first_waiting(engine, line, packing, batch)
        elif at < len(here):
            request, at = int(here[order[at]]), at + 1
        else:
            break
        step, is_full = _add(engine, predictor, packing, step, request)
    was_too_long = is_full and step.requests < packing.size[0]
    _pack_batch(engine, cache, heap, predictor, line, packing, step)
    packing.size[0] = BASE if was_too_long else min(MOST, 2 * packing.size[0])


@compiled
def _first_waiting(engine: SharedEngine, line: Line, packing: Packing, batch: int) -> tuple[int, float]:
    """Return the online request that waits first, or NOBODY, and the seconds until its first token is due."""
    first = next_online(line, batch)
    return first, np.inf if first == NOBODY else _residual_of(engine, packing.bounds, first)


@compiled
def _pack_batch(
    engine: SharedEngine,
    cache: Cache,
    heap: Heap,
    predictor: Predictor,
    line: Line,
    packing: Packing,
    step: Step,
) -> None:
    """Add the batch's requests: those on the engine, whose KV cache is there, before those that wait."""
    for request in _on_engine(engine, 0):
        step, is_full = _add(engine, predictor, packing, step, int(request))
        if is_full:
            return
    while step.tokens < packing.chunk:
        request = next_of_batch(line)
        if request == NOBODY or room(engine, cache) - needed(engine, cache, request) <= 0:
            return
        with_one = with_chunk(step.load, 0, 1)
        if step.requests >= packing.size[0] or predict(predictor, with_one) > step.limit_s:
            return
        taken(engine, line, request)
        admit(engine, cache, heap, request, True)
        step, is_full = _add(engine, predictor, packing, step, request)
        if is_full:
            return


@compiled
def _add(engine: SharedEngine, predictor: Predictor, packing: Packing, step: Step, request: int) -> tuple[Step, bool]:
    """Add a request to the step if it fits; return the step, and whether it is full."""
    r = engine.requests[request]
    take, load = 0, step.load
    if r.state == DECODE:
        load = with_decodes(load, 1, int(r.prompt + r.generated))
    else:
        take = int(min(r.left, packing.chunk - step.tokens))
        if take <= 0:
            return step, False
        load = with_chunk(load, int(r.prompt + r.generated - r.left), take)
    if step.requests >= packing.size[0] or (step.requests > 0 and predict(predictor, load) > step.limit_s):
        return step, True
    r.rests, r.take = 0, take
    return Step(load, step.requests + 1, step.tokens + take, step.limit_s), False


@compiled
def _on_engine(engine: SharedEngine, online: int) -> Column:
    """Return the requests of one kind on the engine: those that decode, then prompts, each in their order."""
    totals, count = engine.totals[0], 0
    found = np.empty(totals.decoding + totals.prefilling, dtype=np.int64)
    for k in range(totals.decoding):
        if engine.requests[engine.decoding[k]].online == online:
            found[count] = engine.decoding[k]
            count += 1
    for k in range(totals.prefilling):
        if engine.requests[engine.prefilling[k]].online == online:
            found[count] = engine.prefilling[k]
            count += 1
    return found[:count]


@compiled
def _residual_s(engine: SharedEngine, bounds: Bounds, those: Column) -> Floats:
    """Return the seconds until the next token of each is due."""
    found = np.empty(len(those))
    for k in range(len(those)):
        found[k] = _residual_of(engine, bounds, int(those[k]))
    return found


@compiled
def _residual_of(engine: SharedEngine, bounds: Bounds, request: int) -> float:
    r = engine.requests[request]
    return float(deadline(bounds, r.arrives_s, r.first_s, r.last_s, r.generated) - engine.totals[0].now_s)
