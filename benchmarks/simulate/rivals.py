"""Simulates schedulers that others use or describe for online requests beside a batch; `Rival` says how they differ.

All take online requests in order of arrival, and the batch's in the order given to them.
"""

from typing import NamedTuple

import numpy as np

from engine_ext.arrays import Floats
from engine_ext.compiled import compiled
from engine_ext.coserve.predictor import Load, Predictor, longest_chunk, predict, with_chunk, with_decodes
from engine_ext.simulate.cache import Cache, Heap, empty_heap
from engine_ext.simulate.line import (
    BATCH,
    BATCH_AGAIN,
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
from engine_ext.simulate.reservation import adapt, to_come
from engine_ext.simulate.shared_engine import (
    NOBODY,
    PREFILL,
    Request,
    SharedEngine,
    admit,
    needed,
    note_generated,
    room,
    run_step,
    take_off,
)

BOTH = -1  # whose step it is


class Rival(NamedTuple):
    """A scheduler's rules.

    `online_first`: online requests go first, and are retracted last. `chunk`: prompt tokens of a step;
    `counts_decodes`: decodes take their part of it. `reserved`: the part of the answers to come that must fit for a
    request to be admitted, as SGLang's new token ratio; 0 for none, as in vLLM. `preempts`: whether an online prompt
    that finds no room takes requests of the batch off the engine; `keeps`: whether these keep their KV cache for as
    long as nobody needs it. `limit_s`: the seconds that a step with work of the batch may take; `idle_is_free`: not
    where no online request is in it. `rate`: the most requests of the batch admitted per second. `group`: how many of
    the batch's requests there are at a time, the next when all of them have ended; 0 for all at once. `chunk_first`: a
    prompt that was begun comes before all others. `alternates`: steps are for online requests and for the batch in
    turns, while both have work. `ratio`: float64 [1], what `reserved` has become, changed in place.
    """

    online_first: bool
    chunk: int
    counts_decodes: bool
    reserved: float
    preempts: bool
    keeps: bool
    limit_s: float
    idle_is_free: bool
    rate: float
    group: int
    chunk_first: bool
    alternates: bool
    ratio: Floats


@compiled
def run_rival(
    engine: SharedEngine,
    cache: Cache,
    predictor: Predictor,
    line: Line,
    rival: Rival,
    batch: int,
    until_s: float,
) -> None:
    """Run until `until_s`, and on until the online requests have ended.

    `batch`: the requests of the batch, the first ones.
    """
    heap, totals = empty_heap(), engine.totals[0]
    online = len(engine.requests) - batch
    while totals.now_s < until_s or (totals.done < online and totals.now_s < DRAIN * until_s):
        note_generated(engine, totals.now_s, until_s)
        arrive(engine, line, batch)
        release_group(engine, line, rival.group)
        choose(engine, cache, heap, predictor, line, rival, batch)
        totals.preempted = 0
        load = run_step(engine, cache, heap, predictor.model, rival.online_first, rival.keeps)
        if load.prompt_tokens + load.decoding == 0 and not wait(engine, line, batch, until_s, rival.rate):
            break
        if rival.reserved > 0.0:
            adapt(engine, rival.ratio, rival.reserved, load.decoding)
        put_back(engine, line)
    note_generated(engine, np.inf, until_s)


@compiled
def choose(
    engine: SharedEngine,
    cache: Cache,
    heap: Heap,
    predictor: Predictor,
    line: Line,
    rival: Rival,
    batch: int,
) -> None:
    """Say what the next step does."""
    totals, requests, limit_s = engine.totals[0], engine.requests, rival.limit_s
    turn = _turn(engine, cache, line, batch) if rival.alternates else BOTH
    _let_rest(engine, turn)
    left = rival.chunk - (totals.decoding if rival.counts_decodes else 0)
    load = Load(0, 0.0, 0, totals.online_decoding, totals.online_kv)
    if rival.chunk_first and totals.prefilling > 0:
        taken_now, load = _give(engine, int(engine.prefilling[0]), left, load)
        left -= taken_now
    for online in range(1, -1, -1):
        if turn not in (online, BOTH):
            continue
        if online == 0:
            is_idle = load.decoding + load.prompts == 0
            limit_s = np.inf if rival.idle_is_free and is_idle else rival.limit_s
            load = _decodes_of_batch(engine, predictor, load, limit_s)
        for k in range(totals.prefilling):
            request = int(engine.prefilling[k])
            if requests[request].take == 0 and (requests[request].online == online or not rival.online_first):
                most = left if online == 1 else _within(predictor, load, requests[request], limit_s, left)
                taken_now, load = _give(engine, request, most, load)
                left -= taken_now
        while left > 0:
            request = _next(engine, line, rival, batch, online)
            if request == NOBODY:
                break
            most = left if online == 1 else _within(predictor, load, requests[request], limit_s, left)
            if most == 0 or not _make_room_for(engine, cache, heap, line, rival, request):
                break
            taken(engine, line, request)
            admit(engine, cache, heap, request)
            taken_now, load = _give(engine, request, most, load)
            left -= taken_now


@compiled
def _turn(engine: SharedEngine, cache: Cache, line: Line, batch: int) -> int:
    """Return whose step this is where the classes take turns: 1 for online requests, 0 for the batch."""
    totals, theirs, ours = engine.totals[0], 0, 0
    for k in range(totals.prefilling):
        theirs += engine.requests[engine.prefilling[k]].online
    ours = totals.decoding + totals.prefilling - totals.online_decoding - theirs
    theirs += totals.online_decoding
    for online in range(2):
        request = next_online(line, batch) if online == 1 else next_of_batch(line)
        if request != NOBODY and room(engine, cache) - needed(engine, cache, request) > 0:
            theirs, ours = theirs + online, ours + 1 - online
    if theirs == 0 or ours == 0:
        return BOTH
    return int(totals.steps % 2)


@compiled
def _let_rest(engine: SharedEngine, turn: int) -> None:
    """Let the decodes rest whose turn it is not."""
    for k in range(engine.totals[0].decoding):
        r = engine.requests[engine.decoding[k]]
        r.rests = 0 if turn in (r.online, BOTH) else 1


@compiled
def _next(engine: SharedEngine, line: Line, rival: Rival, batch: int, online: int) -> int:
    """Return who is admitted next, of the one kind or, without `online_first`, of both by arrival."""
    theirs, ours = next_online(line, batch), next_of_batch(line)
    if ours != NOBODY and line.at[BATCH_AGAIN] == 0 and line.at[BATCH] >= rival.rate * engine.totals[0].now_s:
        ours = NOBODY
    if rival.online_first:
        return theirs if online == 1 else ours
    if theirs == NOBODY or ours == NOBODY:
        return max(theirs, ours)
    return ours if engine.requests[ours].arrives_s <= engine.requests[theirs].arrives_s else theirs


@compiled
def _give(engine: SharedEngine, request: int, most: int, load: Load) -> tuple[int, Load]:
    """Give a prompt up to `most` tokens of the step; return how many it takes, and the load with these."""
    r = engine.requests[request]
    r.take = max(0, min(most, r.left))
    if r.take == 0:
        return 0, load
    before = r.prompt + r.generated - r.left
    return int(r.take), with_chunk(load, before, int(r.take))


@compiled
def _within(predictor: Predictor, load: Load, r: Request, limit_s: float, most: int) -> int:
    if limit_s == np.inf or most <= 0:
        return max(0, most)
    before = r.prompt + r.generated - r.left if r.state == PREFILL else 0
    return longest_chunk(predictor, load, int(before), limit_s, most)


@compiled
def _decodes_of_batch(engine: SharedEngine, predictor: Predictor, load: Load, limit_s: float) -> Load:
    """Let the batch's decodes into the step in their order while the limit allows it (HyGen algorithm 1)."""
    totals = engine.totals[0]
    for k in range(totals.decoding):
        r = engine.requests[engine.decoding[k]]
        if r.online == 1:
            continue
        more = with_decodes(load, 1, int(r.prompt + r.generated))
        if limit_s < np.inf and predict(predictor, more) > limit_s:
            r.rests = 1
        else:
            load = more
    return load


@compiled
def _make_room_for(engine: SharedEngine, cache: Cache, heap: Heap, line: Line, rival: Rival, request: int) -> bool:
    """Return whether there is room for the request; if the rules say so, the batch's latest make room for it."""
    if engine.requests[request].online == 1 and rival.preempts:
        return make_room(engine, cache, heap, line, request, rival.keeps)
    return fits(engine, cache, request, float(rival.ratio[0]))


@compiled
def make_room(engine: SharedEngine, cache: Cache, heap: Heap, line: Line, request: int, keep: bool) -> bool:
    """Return whether there is room for a request, for which the batch's latest leave the engine; see `take_off`."""
    while room(engine, cache) - needed(engine, cache, request) <= 0:
        victim = latest_of_batch(engine)
        if victim == NOBODY:
            return False
        engine.totals[0].preempted = 0
        take_off(engine, cache, heap, victim, keep)
        put_back(engine, line)
    return True


@compiled
def fits(engine: SharedEngine, cache: Cache, request: int, reserved: float) -> bool:
    """Return whether there is room for a request and, beside others, for the reserved part of the answers to come."""
    totals, answers = engine.totals[0], 0.0
    if reserved > 0.0 and totals.decoding + totals.prefilling > 0:
        answers = reserved * _all_to_come(engine) + to_come(engine, request)
    return bool(room(engine, cache) - needed(engine, cache, request) > answers)


@compiled
def latest_of_batch(engine: SharedEngine) -> int:
    totals, latest = engine.totals[0], NOBODY
    for k in range(totals.decoding):
        request = int(engine.decoding[k])
        r = engine.requests[request]
        if r.online == 0 and (latest == NOBODY or r.number > engine.requests[latest].number):
            latest = request
    for k in range(totals.prefilling):
        request = int(engine.prefilling[k])
        r = engine.requests[request]
        if r.online == 0 and (latest == NOBODY or r.number > engine.requests[latest].number):
            latest = request
    return latest


@compiled
def _all_to_come(engine: SharedEngine) -> float:
    totals, tokens = engine.totals[0], 0.0
    for k in range(totals.decoding):
        tokens += to_come(engine, int(engine.decoding[k]))
    for k in range(totals.prefilling):
        tokens += to_come(engine, int(engine.prefilling[k]))
    return tokens
