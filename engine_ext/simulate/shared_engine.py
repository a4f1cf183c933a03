"""Simulates one engine that serves online requests beside those of a batch, step by step.

It differs from `engine.py` in what a step may do: leave decodes out, give several prompts a part of it, and take
requests off the engine, with or without what they have computed. A policy says what each step does; this file does it.
"""

from heapq import heappush
from typing import NamedTuple

import numpy as np

from engine_ext.arrays import Bools, Column, Floats, Records, column, new_records
from engine_ext.compiled import compiled
from engine_ext.coserve.predictor import Load
from engine_ext.costs.engine_model import StepModel, compute_time, step_time
from engine_ext.simulate.cache import Cache, Heap, grow, lock, make_ready, release, work_of_next

COMES, WAITS, PREFILL, DECODE, DONE = range(5)
NOBODY = -1


class Request:
    """One request.

    `prompt`, `output`, `generated`: tokens. `online`: 1 if someone waits for it; `slo`: its class then. `state`: one of
    COMES to DONE. `left`: prompt tokens still to compute; `take`: prompt tokens of the next step. `held`: output tokens
    in the KV cache; `kept`: those left there when it was taken off. `counted`: output tokens when the time was over.
    `number`: the order of admission. `place`: its index in `decoding`. `rests`: 1 if the next step leaves it out;
    `skipped`: for how many steps running. `preempted`: how often it was taken off. `gap_s`: the longest time between
    two of its tokens.
    """

    leaf: int
    prompt: int
    output: int
    online: int
    slo: int
    state: int
    generated: int
    left: int
    take: int
    held: int
    kept: int
    counted: int
    number: int
    place: int
    rests: int
    skipped: int
    preempted: int
    arrives_s: float
    first_s: float
    last_s: float
    gap_s: float


class Totals:
    """Counts what the engine has done, and who is on it.

    `decoding`, `prefilling`: requests in these columns. `online_decoding`, `online_kv`: online requests that decode,
    and the KV tokens that they read. `online_locked`: KV tokens of all online requests on the engine, with prefixes.
    `is_over`: 1 when the time of the arrivals is. `gaps`: seconds between tokens of online requests that are written
    down. `done`: the online requests that have ended. `preempted`, `finished`, `prefilled`: what the last step or
    policy put into the columns of these names.
    """

    steps: int
    decoding: int
    prefilling: int
    online_decoding: int
    online_kv: int
    online_locked: int
    gaps: int
    done: int
    admitted: int
    preempted: int
    finished: int
    prefilled: int
    preemptions: int
    recomputed: int
    restored: int
    left_out: int
    is_over: int
    now_s: float
    busy_s: float
    last_step_s: float


class SharedEngine(NamedTuple):
    """The engine's state. `requests`: those of the batch first, then the online ones in order of arrival."""

    requests: Records[Request]
    decoding: Column
    prefilling: Column
    finished: Column
    prefilled: Column
    preempted: Column
    gaps: Floats
    totals: Records[Totals]


def new_shared_engine(leaf: Column, prompt: Column, output: Column, online: Bools, arrives_s: Floats) -> SharedEngine:
    """Return the engine before anything has arrived; all columns are by request."""
    count = len(leaf)
    requests = new_records(Request, count)
    for name, values in (("leaf", leaf), ("prompt", prompt), ("online", online), ("arrives_s", arrives_s)):
        column(requests, name)[:] = values
    column(requests, "output")[:] = np.maximum(output, 1)
    column(requests, "state")[:] = np.where(online, COMES, WAITS)
    gaps = np.zeros(int(column(requests, "output")[online].sum()))

    def places() -> Column:
        return np.zeros(count, dtype=np.int64)

    totals = new_records(Totals, 1)
    return SharedEngine(requests, places(), places(), places(), places(), places(), gaps, totals)


@compiled
def note_generated(engine: SharedEngine, now_s: float, until_s: float) -> None:
    """Note how many output tokens each request has when a step first ends after `until_s`.

    Of two engines in pools, this is a step of the one that is behind.
    """
    totals = engine.totals[0]
    if totals.is_over == 0 and now_s >= until_s:
        totals.is_over = 1
        for request in range(len(engine.requests)):
            engine.requests[request].counted = engine.requests[request].generated


@compiled
def needed(engine: SharedEngine, cache: Cache, request: int) -> int:
    """Return the free or evictable KV tokens that admitting the request takes."""
    r = engine.requests[request]
    node, tokens = r.leaf, 0
    while cache.users[node] == 0:
        tokens += cache.size[node]
        node = cache.parent[node]
    return tokens + r.generated


@compiled
def room(engine: SharedEngine, cache: Cache) -> int:
    """Return the KV tokens that are free or evictable beside the next token of everything that decodes."""
    return cache.tokens[0].free + cache.tokens[0].evictable - engine.totals[0].decoding


@compiled
def admit(engine: SharedEngine, cache: Cache, heap: Heap, request: int, has_copies: bool = False) -> int:
    """Admit a request for which there is room; return the prompt tokens that it has to compute.

    `has_copies`: what a request had computed when it was taken off comes back at no cost, wherever it is now.
    """
    totals, r = engine.totals[0], engine.requests[request]
    is_kept = r.kept > 0 and cache.cached[r.leaf] and cache.extra[r.leaf] >= r.kept
    before = cache.tokens[0].locked
    tokens, _ = lock(cache, heap, r.leaf)
    if is_kept and tokens == 0:
        cache.extra[r.leaf] -= r.kept
        cache.tokens[0].evictable -= r.kept
        cache.tokens[0].locked += r.kept
        totals.restored += r.prompt + r.kept
        again = r.generated - r.kept
    else:
        again = r.generated
    grow(cache, heap, again)
    if r.generated > 0 and not has_copies:
        totals.recomputed += tokens + max(0, again - 1)
    r.held, r.kept = r.generated, 0
    r.left = 1 if has_copies and r.generated > 0 else max(1, tokens + again)
    r.state, r.number, r.take = PREFILL, totals.admitted, 0
    totals.admitted += 1
    engine.prefilling[totals.prefilling] = request
    totals.prefilling += 1
    if r.online == 1:
        totals.online_locked += cache.tokens[0].locked - before
    return int(r.left)


@compiled
def take_off(engine: SharedEngine, cache: Cache, heap: Heap, request: int, keep: bool) -> None:
    """Preempt a request; `keep`: whether its output tokens stay in the cache, for as long as they can."""
    totals, r = engine.totals[0], engine.requests[request]
    leave(engine, cache, heap, request, keep)
    r.preempted += 1
    totals.preemptions += 1
    engine.preempted[totals.preempted] = request
    totals.preempted += 1


@compiled
def leave(engine: SharedEngine, cache: Cache, heap: Heap, request: int, keep: bool) -> None:
    """Take a request off the engine, so that it waits again; `keep` as in `take_off`."""
    totals, r = engine.totals[0], engine.requests[request]
    before = cache.tokens[0].locked
    if r.state == DECODE:
        _stop_decoding(engine, request)
        release(cache, heap, r.leaf, r.held, keep)
        r.kept = r.held if keep else 0
    else:
        _stop_prefill(engine, request)
        release(cache, heap, r.leaf, r.held, False)
        _abandon(cache, heap, r.leaf)
    if r.online == 1:
        totals.online_locked -= before - cache.tokens[0].locked
    r.state, r.take, r.held, r.rests = WAITS, 0, 0, 0


@compiled
def run_step(engine: SharedEngine, cache: Cache, heap: Heap, model: StepModel, online_first: bool, keeps: bool) -> Load:
    """Run one step: each prompt computes its `take`, and all decode but those that rest; return what it did.

    If there is no room for their next tokens, the batch's requests are retracted, those with the fewest output tokens
    first; without `online_first`, online requests are too. With `keeps`, their outputs stay cached while they can.
    """
    totals = engine.totals[0]
    totals.finished, totals.prefilled = 0, 0
    decoding = _make_room(engine, cache, heap, online_first, keeps)
    tokens, quadratic, prompts = _prefill(engine)
    kv = 0
    for k in range(totals.decoding):
        r = engine.requests[engine.decoding[k]]
        kv += 0 if r.rests == 1 else r.prompt + r.generated
    load = Load(tokens, quadratic, prompts, decoding, kv)
    seconds = step_time(model, compute_time(model, tokens + decoding, quadratic), kv * model.read_s)
    totals.now_s += seconds
    totals.busy_s += seconds
    totals.last_step_s = seconds
    totals.steps += 1
    if decoding > 0:  # where nobody decodes, nobody is left out
        _decode(engine, cache, heap)
    _end_prompts(engine, cache, heap)
    return load


@compiled
def _make_room(engine: SharedEngine, cache: Cache, heap: Heap, online_first: bool, keeps: bool) -> int:
    """Lock a token for everything that decodes in this step; return how many requests that are."""
    totals = engine.totals[0]
    while True:
        count, victim, fewest = 0, NOBODY, 0
        for k in range(totals.decoding):
            request = engine.decoding[k]
            r = engine.requests[request]
            count += 1 - r.rests
            class_ = r.online if online_first else 0
            rank = (class_ << 40) + r.generated
            if victim == NOBODY or rank < fewest:
                victim, fewest = request, rank
        if count == 0 or grow(cache, heap, count):
            return count
        take_off(engine, cache, heap, victim, keeps)


@compiled
def _prefill(engine: SharedEngine) -> tuple[int, float, int]:
    tokens, quadratic, prompts = 0, 0.0, 0
    for k in range(engine.totals[0].prefilling):
        r = engine.requests[engine.prefilling[k]]
        taken = min(r.take, r.left)
        if taken <= 0:
            continue
        quadratic += work_of_next(r.prompt + r.generated, r.left, taken)
        r.left -= taken
        tokens += taken
        prompts += 1
    return tokens, quadratic, prompts


@compiled
def _decode(engine: SharedEngine, cache: Cache, heap: Heap) -> None:
    totals = engine.totals[0]
    for k in range(totals.decoding - 1, -1, -1):  # the last takes the place of one that ends
        request = engine.decoding[k]
        r = engine.requests[request]
        if r.rests == 1:
            r.skipped += 1
            totals.left_out += 1
            continue
        r.held += 1
        r.skipped = 0
        if r.online == 1:
            totals.online_kv += 1
            totals.online_locked += 1
        _got_token(engine, request)
        if r.generated == r.output:
            _stop_decoding(engine, request)
            _end(engine, cache, heap, request)


@compiled
def _end_prompts(engine: SharedEngine, cache: Cache, heap: Heap) -> None:
    """Let the requests decode whose prompts are computed; a prefill gives them a token."""
    totals, kept = engine.totals[0], 0
    for k in range(totals.prefilling):
        request = engine.prefilling[k]
        r = engine.requests[request]
        r.take = 0
        if r.left > 0:
            engine.prefilling[kept] = request
            kept += 1
            continue
        make_ready(cache, r.leaf)
        engine.prefilled[totals.prefilled] = request
        totals.prefilled += 1
        _got_token(engine, request)
        if r.generated == r.output:
            _end(engine, cache, heap, request)
            continue
        r.state, r.skipped, r.rests, r.place = DECODE, 0, 0, totals.decoding
        engine.decoding[totals.decoding] = request
        totals.decoding += 1
        if r.online == 1:
            totals.online_decoding += 1
            totals.online_kv += r.prompt + r.generated
    totals.prefilling = kept


@compiled
def _got_token(engine: SharedEngine, request: int) -> None:
    totals, r = engine.totals[0], engine.requests[request]
    if r.online == 1 and r.generated > 0:
        engine.gaps[totals.gaps] = totals.now_s - r.last_s
        totals.gaps += 1
        r.gap_s = max(r.gap_s, totals.now_s - r.last_s)
    if r.generated == 0:
        r.first_s = totals.now_s
    r.last_s = totals.now_s
    r.generated += 1


@compiled
def _end(engine: SharedEngine, cache: Cache, heap: Heap, request: int) -> None:
    totals, r = engine.totals[0], engine.requests[request]
    before = cache.tokens[0].locked
    release(cache, heap, r.leaf, r.held, True)
    if r.online == 1:
        totals.online_locked -= before - cache.tokens[0].locked
        totals.done += 1
    r.state, r.held = DONE, 0
    engine.finished[totals.finished] = request
    totals.finished += 1


@compiled
def _stop_decoding(engine: SharedEngine, request: int) -> None:
    totals, r = engine.totals[0], engine.requests[request]
    totals.decoding -= 1
    last = engine.decoding[totals.decoding]
    engine.decoding[r.place] = last
    engine.requests[last].place = r.place
    if r.online == 1:
        totals.online_decoding -= 1
        totals.online_kv -= r.prompt + r.generated


@compiled
def _stop_prefill(engine: SharedEngine, request: int) -> None:
    totals, kept = engine.totals[0], 0
    for k in range(totals.prefilling):
        if engine.prefilling[k] != request:
            engine.prefilling[kept] = engine.prefilling[k]
            kept += 1
    totals.prefilling = kept


@compiled
def _abandon(cache: Cache, heap: Heap, leaf: int) -> None:
    """Free the nodes of a path that were never computed and that nobody else uses."""
    node = leaf
    while node != 0 and not cache.ready[node] and cache.users[node] == 0 and cache.children[node] == 0:
        cache.cached[node] = False
        tokens = cache.size[node] + cache.extra[node]
        cache.extra[node] = 0
        cache.tokens[0].evictable -= tokens
        cache.tokens[0].free += tokens
        node = cache.parent[node]
        cache.children[node] -= 1
    if node != 0 and cache.users[node] == 0 and cache.children[node] == 0:
        heappush(heap, (int(cache.used[node]), int(node)))
