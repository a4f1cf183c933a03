"""Simulates two engines in pools, as OOCO describes them: a relaxed one computes prompts, and a strict one decodes.

A request's KV cache moves from one to the other when its prompt is computed. The engines have clocks of their own, and
the one whose clock is behind takes the next step. Where OOCO breaks off a prompt of the batch between two layers, the
step here ends first; it is as short as the chunk.
"""

from typing import NamedTuple

import numpy as np

from benchmarks.simulate.rivals import Rival, choose, fits, latest_of_batch
from engine_ext.arrays import Floats
from engine_ext.compiled import compiled
from engine_ext.coserve.harvest import harvest
from engine_ext.coserve.predictor import Load, Predictor, predict, with_decodes
from engine_ext.simulate.cache import Cache, Heap, empty_heap
from engine_ext.simulate.line import ARRIVED, BATCH, DRAIN, Line, arrive, next_of_batch, put_back, release_group
from engine_ext.simulate.shared_engine import (
    NOBODY,
    SharedEngine,
    admit,
    leave,
    needed,
    note_generated,
    room,
    run_step,
    take_off,
)

TICK_S = 1e-6  # by which an engine without work stays behind the other, which may bring it some
MOST_PULLED = 64  # requests that the strict engine takes over before a step


class Pooling(NamedTuple):
    """Holds a policy's rules for the two engines; `prompts`: those of the relaxed engine.

    `reserved`: the part of the answers to come for which the strict engine keeps room. `most`: the requests on it
    beyond which none of the batch is added. `limit_s`: the seconds of its steps, which decodes of the batch are left
    out to keep. `pulls`: whether the relaxed engine decodes the batch too, until the strict one takes requests over
    (OOCO algorithm 1). `token_s`: the seconds that it takes to move the KV cache of a token.
    """

    prompts: Rival
    reserved: float
    most: int
    limit_s: float
    pulls: bool
    token_s: float


class Pools(NamedTuple):
    """Holds the two engines, which have the same `requests`, and their caches.

    `ready_s`: by request, when its KV cache is on the strict engine. `saturated`: the tokens of a step from which on it
    takes longer for more of them.
    """

    relaxed: SharedEngine
    relaxed_cache: Cache
    strict: SharedEngine
    strict_cache: Cache
    ready_s: Floats
    saturated: int


@compiled
def run_pools(pools: Pools, predictor: Predictor, line: Line, rules: Pooling, batch: int, until_s: float) -> None:
    """Run until `until_s`, and on until the online requests have ended."""
    relaxed, strict = pools.relaxed.totals[0], pools.strict.totals[0]
    prompts, decodes = empty_heap(), empty_heap()
    online = len(pools.relaxed.requests) - batch
    while True:
        now_s = min(relaxed.now_s, strict.now_s)
        if now_s >= until_s and (relaxed.done + strict.done >= online or now_s >= DRAIN * until_s):
            break
        note_generated(pools.relaxed, now_s, until_s)
        _push(pools, prompts, decodes, line, rules)
        if relaxed.now_s <= strict.now_s:
            arrive(pools.relaxed, line, batch)
            release_group(pools.relaxed, line, 0)
            _choose_relaxed(pools, prompts, predictor, line, rules, batch)
            relaxed.preempted = 0
            load = run_step(
                pools.relaxed, pools.relaxed_cache, prompts, predictor.model, rules.prompts.online_first, False
            )
            put_back(pools.relaxed, line)
            if load.prompt_tokens + load.decoding == 0 and not _wait_relaxed(pools, line, rules, batch, until_s):
                break
        else:
            if rules.pulls:
                _pull(pools, prompts, decodes, predictor, rules)
            _choose_strict(pools, predictor, rules)
            strict.preempted = 0
            load = run_step(
                pools.strict, pools.strict_cache, decodes, predictor.model, rules.prompts.online_first, False
            )
            put_back(pools.strict, line)
            if load.prompt_tokens + load.decoding == 0:
                _wait_strict(pools)
    note_generated(pools.relaxed, np.inf, until_s)


@compiled
def _choose_relaxed(pools: Pools, heap: Heap, predictor: Predictor, line: Line, rules: Pooling, batch: int) -> None:
    """Say what the next step of the relaxed engine does: prompts, and decodes of the batch where it has these."""
    engine = pools.relaxed
    choose(engine, pools.relaxed_cache, heap, predictor, line, rules.prompts, batch)
    for k in range(engine.totals[0].decoding):
        r = engine.requests[engine.decoding[k]]
        if r.online == 1 or not rules.pulls:
            r.rests = 1  # until its KV cache moves


@compiled
def _choose_strict(pools: Pools, predictor: Predictor, rules: Pooling) -> None:
    """Say what the next step of the strict engine does: what has come, and of the batch's decodes as many as fit."""
    engine = pools.strict
    totals, requests, came = engine.totals[0], engine.requests, 0
    for k in range(totals.prefilling):
        request = engine.prefilling[k]
        requests[request].take = 1 if pools.ready_s[request] <= totals.now_s else 0
        came += requests[request].take
    if rules.limit_s == np.inf:
        return
    of_batch = np.empty(totals.decoding, dtype=np.int64)
    kv, skipped = np.empty_like(of_batch), np.empty_like(of_batch)
    count = 0
    for k in range(totals.decoding):
        r = requests[engine.decoding[k]]
        if r.online == 0:
            of_batch[count], kv[count], skipped[count] = engine.decoding[k], r.prompt + r.generated, r.skipped
            count += 1
    load = Load(came, 0.0, came, totals.online_decoding, totals.online_kv)
    rests = np.zeros(count, dtype=np.bool_)
    harvest(predictor, load, kv[:count], skipped[:count], rests, rules.limit_s, 0, 0)
    for k in range(count):
        requests[of_batch[k]].rests = 1 if rests[k] else 0


@compiled
def _push(pools: Pools, prompts: Heap, decodes: Heap, line: Line, rules: Pooling) -> None:
    """Move requests whose prompt is computed to the strict engine, in the order of their admission."""
    relaxed, strict = pools.relaxed, pools.strict
    while True:
        request = _first_to_push(relaxed, rules)
        if request == NOBODY:
            return
        is_online = relaxed.requests[request].online == 1
        if is_online and rules.prompts.online_first:
            if not _make_room_for(pools, decodes, line, rules, request):
                return
        else:
            on_strict = strict.totals[0].decoding + strict.totals[0].prefilling
            if on_strict >= rules.most or not fits(strict, pools.strict_cache, request, rules.reserved):
                return
        _move(pools, prompts, decodes, request, rules.token_s)


@compiled
def _first_to_push(relaxed: SharedEngine, rules: Pooling) -> int:
    """Return the request that moves next, or NOBODY; with `online_first`, online requests go before the batch's."""
    first, least = NOBODY, 0
    for k in range(relaxed.totals[0].decoding):
        request = int(relaxed.decoding[k])
        r = relaxed.requests[request]
        if r.online == 0 and rules.pulls:
            continue
        rank = int(r.number) + ((1 - int(r.online)) << 40 if rules.prompts.online_first else 0)
        if first == NOBODY or rank < least:
            first, least = request, rank
    return first


@compiled
def _move(pools: Pools, prompts: Heap, decodes: Heap, request: int, token_s: float) -> None:
    """Move a request to the strict engine, where its place is taken at once; it is there when its KV cache is."""
    r = pools.relaxed.requests[request]
    leave(pools.relaxed, pools.relaxed_cache, prompts, request, False)
    admit(pools.strict, pools.strict_cache, decodes, request, True)
    now_s = max(pools.relaxed.totals[0].now_s, pools.strict.totals[0].now_s)
    pools.ready_s[request] = now_s + (r.prompt + r.generated) * token_s


@compiled
def _make_room_for(pools: Pools, heap: Heap, line: Line, rules: Pooling, request: int) -> bool:
    """Return whether the strict engine has room for an online request, for which the batch's leave it."""
    strict, cache = pools.strict, pools.strict_cache
    while room(strict, cache) - needed(strict, cache, request) <= 0:
        victim = _by_bottleneck(pools) if rules.pulls else latest_of_batch(strict)
        if victim == NOBODY:
            return False
        strict.totals[0].preempted = 0
        take_off(strict, cache, heap, victim, False)
        put_back(strict, line)
    return True


@compiled
def _by_bottleneck(pools: Pools) -> int:
    """Return the decode of the batch that leaves first: the longest where compute binds, else the shortest.

    OOCO 3.4.1. Long ones leave more decodes in the batch; short ones leave less to compute again.
    """
    strict, found, length = pools.strict, NOBODY, 0
    binds = strict.totals[0].decoding >= pools.saturated
    for k in range(strict.totals[0].decoding):
        request = int(strict.decoding[k])
        r = strict.requests[request]
        tokens = int(r.prompt + r.generated)
        if r.online == 0 and (found == NOBODY or (tokens > length if binds else tokens < length)):
            found, length = request, tokens
    return found if found != NOBODY else latest_of_batch(strict)


@compiled
def _pull(pools: Pools, prompts: Heap, decodes: Heap, predictor: Predictor, rules: Pooling) -> None:
    """Let the strict engine take decodes of the batch over, if its last step left none out (OOCO algorithm 1)."""
    strict, totals = pools.strict, pools.strict.totals[0]
    load = Load(0, 0.0, 0, 0, 0)
    for k in range(totals.decoding):
        r = strict.requests[strict.decoding[k]]
        if r.rests == 1:
            return
        load = with_decodes(load, 1, int(r.prompt + r.generated))
    for k in range(totals.prefilling):
        r = strict.requests[strict.prefilling[k]]
        load = with_decodes(load, 1, int(r.prompt + r.generated))
    for _ in range(MOST_PULLED):
        if predict(predictor, load) >= rules.limit_s:
            return
        request = _nearest(pools, predictor, load, rules, _preferred(pools, predictor, load, rules.limit_s))
        if request == NOBODY:
            return
        r = strict.requests[request]
        load = with_decodes(load, 1, int(r.prompt + r.generated))
        _move(pools, prompts, decodes, request, rules.token_s)


@compiled
def _preferred(pools: Pools, predictor: Predictor, load: Load, limit_s: float) -> int:
    """Return the length of the requests that suit the strict engine best; 0 for the shortest."""
    group = max(1, pools.saturated - load.decoding)
    least, most = 0, int(predictor.model.capacity)
    while least < most:
        length = (least + most + 1) // 2
        if predict(predictor, with_decodes(load, group, group * length)) <= limit_s:
            least = length
        else:
            most = length - 1
    return least


@compiled
def _nearest(pools: Pools, predictor: Predictor, load: Load, rules: Pooling, length: int) -> int:
    """Return the batch's decode on the relaxed engine that is nearest to a length and fits; NOBODY if none does."""
    relaxed, found, least = pools.relaxed, NOBODY, 0
    for k in range(relaxed.totals[0].decoding):
        request = int(relaxed.decoding[k])
        r = relaxed.requests[request]
        tokens = int(r.prompt + r.generated)
        distance = abs(tokens - length)
        if r.online == 1 or (found != NOBODY and distance >= least):
            continue
        if predict(predictor, with_decodes(load, 1, tokens)) <= rules.limit_s:
            found, least = request, distance
    if found == NOBODY or not fits(pools.strict, pools.strict_cache, found, rules.reserved):
        return NOBODY
    return found


@compiled
def _wait_relaxed(pools: Pools, line: Line, rules: Pooling, batch: int, until_s: float) -> bool:
    """Let time pass on the relaxed engine; return False if nothing can happen any more."""
    totals, strict = pools.relaxed.totals[0], pools.strict.totals[0]
    next_s, coming = np.inf, batch + line.at[ARRIVED]
    if coming < len(pools.relaxed.requests):
        next_s = pools.relaxed.requests[coming].arrives_s
    if next_of_batch(line) != NOBODY:
        begins_s = (line.at[BATCH] + 0.01) / rules.prompts.rate
        next_s = min(next_s, begins_s) if begins_s > totals.now_s else next_s
    if strict.decoding + strict.prefilling > 0:
        next_s = min(next_s, strict.now_s + TICK_S)
    if next_s == np.inf:
        if totals.now_s >= until_s:
            return False
        next_s = until_s
    totals.now_s = max(totals.now_s, next_s)
    return True


@compiled
def _wait_strict(pools: Pools) -> None:
    """Let time pass on the strict engine until KV cache has come, or until the relaxed engine has taken a step."""
    totals = pools.strict.totals[0]
    next_s = pools.relaxed.totals[0].now_s + TICK_S
    for k in range(totals.prefilling):
        next_s = min(next_s, float(pools.ready_s[pools.strict.prefilling[k]]))
    totals.now_s = max(totals.now_s, next_s)
