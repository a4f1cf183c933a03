"""Simulates one engine step by step: continuous batching, chunked prefill, a KV cache of fixed size, retraction."""

from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from engine_ext.arrays import Column, Floats, Records, new_records
from engine_ext.compiled import compiled
from engine_ext.costs.engine_model import StepModel, compute_time, step_time
from engine_ext.simulate.cache import (
    Cache,
    Heap,
    empty_heap,
    grow,
    lock,
    make_ready,
    release,
    stash,
    twice,
    unlocked,
    work_of_next,
)

SERIES = 1 << 16  # rows of a run's series; when all are full, every two become one
WAITS, PREFILL, DECODE, DONE, RETRACTED = range(5)


class EngineTotals:
    """Counts what the engine has done, and says where it is now.

    `steps` counts all steps, `decodes` those that decoded. `decoding` requests decode now and read `decoding_kv` tokens
    in a step; `pending` is the prompt tokens of requests in prefill. `queue_first` and `queue_last` are indexes into
    `queue`; `prefilled`, `finished` and `retracted` count what the last step put into the columns of these names.
    `retractions` counts all retractions, `recomputed` the tokens computed again after them. `series_length` rows of the
    series are full, each of `series_every` steps. `most_locked` is the KV tokens at the fullest. `seconds`, `compute_s`
    and `reads_s` are sums over all steps; `since_*` are those of the row of the series that is not full.
    """

    steps: int
    decodes: int
    decoding: int
    decoding_kv: int
    pending: int
    queue_first: int
    queue_last: int
    prefilled: int
    finished: int
    retracted: int
    retractions: int
    recomputed: int
    series_length: int
    series_every: int
    most_locked: int
    seconds: float
    compute_s: float
    reads_s: float
    since_seconds: float
    since_compute_s: float
    since_reads_s: float


class Engine(NamedTuple):
    """Holds the state of the engine by request.

    `leaf` is that of the request's prompt; `prompt` and `output` are its tokens, `generated` those so far; `state` is
    one of WAITS to RETRACTED. `left` are the prompt tokens still to compute; `place` is the index in `decoding`, `ends`
    the decode step at which it ends, and `twice` the tokens that it computes although another request does too;
    `ended_s` is when it ended. `queue` holds requests in prefill, first come, first served; `prefilled`, `finished` and
    `retracted` hold those of the last step. `totals` is one record. `series` has the seconds, compute and reads of
    intervals of steps.
    """

    leaf: Column
    prompt: Column
    output: Column
    generated: Column
    state: Column
    left: Column
    twice: Column
    place: Column
    ends: Column
    decoding: Column
    queue: Column
    prefilled: Column
    finished: Column
    retracted: Column
    ended_s: Floats
    totals: Records[EngineTotals]
    series: Floats


def new_engine(leaf: Column, prompt: Column, output: Column) -> Engine:
    requests = len(leaf)
    totals = new_records(EngineTotals, 1)
    totals[0].series_every = 1

    def column() -> Column:
        return np.zeros(requests, dtype=np.int64)

    return Engine(
        leaf=leaf.copy(),
        prompt=prompt.copy(),
        output=np.maximum(output, 1),
        generated=column(),
        state=column(),
        left=column(),
        twice=column(),
        place=column(),
        ends=column(),
        decoding=column(),
        queue=np.zeros(requests + 1, dtype=np.int64),
        prefilled=column(),
        finished=column(),
        retracted=column(),
        ended_s=np.zeros(requests),
        totals=totals,
        series=np.zeros((SERIES, 3)),
    )


def series_of(engine: Engine) -> Floats:
    """Return seconds, compute and reads of all intervals of steps so far; float64 [intervals, 3].

    The last interval is shorter than the others.
    """
    totals = engine.totals[0]
    since = [totals.since_seconds, totals.since_compute_s, totals.since_reads_s]
    return np.vstack([engine.series[: totals.series_length], since])


@compiled
def ends_of_decoding(engine: Engine) -> Heap:
    """Return a heap of the decode steps at which the decoding requests end."""
    ends = empty_heap()
    for k in range(engine.totals[0].decoding):
        request = engine.decoding[k]
        heappush(ends, (int(engine.ends[request]), int(request)))
    return ends


@compiled
def room_for(cache: Cache, leaf: int) -> int:
    """Return the tokens that stay free or evictable when the leaf's path is locked."""
    return cache.tokens[0].free + cache.tokens[0].evictable - unlocked(cache, leaf)


@compiled
def admit(engine: Engine, cache: Cache, heap: Heap, model: StepModel, request: int) -> int:
    """Admit a request whose path and generated tokens fit; return the tokens that it has to compute."""
    totals = engine.totals[0]
    generated = engine.generated[request]
    more, more_quadratic = 0, 0.0
    if model.computes_twice:
        more, more_quadratic = twice(cache, engine.leaf[request])
    tokens, quadratic = lock(cache, heap, engine.leaf[request])
    grow(cache, heap, generated)
    if more > 0 and grow(cache, heap, more):
        engine.twice[request] = more
        tokens, quadratic = tokens + more, quadratic + more_quadratic
    if engine.state[request] == RETRACTED:
        totals.recomputed += tokens + generated
    else:
        cache.tokens[0].computed += tokens
        cache.tokens[0].quadratic += quadratic
    tokens = max(1, tokens + generated)
    engine.left[request], engine.state[request] = tokens, PREFILL
    engine.queue[totals.queue_last % len(engine.queue)] = request
    totals.queue_last += 1
    totals.pending += tokens
    return tokens


@compiled
def step(engine: Engine, cache: Cache, heap: Heap, ends: Heap, model: StepModel, budget: int) -> int:
    """Run one step with at most `budget` prompt tokens; return what each decoding request got: 0 or 1 output tokens."""
    totals = engine.totals[0]
    totals.prefilled, totals.finished, totals.retracted = 0, 0, 0
    alone = model.clock == 2 and budget > 0 and totals.pending > 0
    decoding = 0 if alone else _make_room_to_decode(engine, cache, heap)
    totals.most_locked = max(totals.most_locked, cache.tokens[0].locked)
    reads = totals.decoding_kv * model.read_s if decoding > 0 else 0.0
    tokens, quadratic = _prefill(engine, budget)
    if model.computes_twice and tokens > 0 and totals.queue_first < totals.queue_last:
        cut = engine.queue[totals.queue_first % len(engine.queue)]  # its chunk is in the cache by the next step
        stash(cache, int(engine.leaf[cut]), int(engine.prompt[cut] + engine.generated[cut] - engine.left[cut]))
    compute = compute_time(model, tokens + decoding, quadratic)
    seconds = step_time(model, compute, reads)
    if decoding > 0:
        totals.decodes += 1
        totals.decoding_kv += decoding
        _finish(engine, cache, heap, ends)
    _start_decoding(engine, cache, ends)
    totals.steps += 1
    totals.seconds += seconds
    for k in range(totals.finished):
        engine.ended_s[engine.finished[k]] = totals.seconds
    totals.compute_s += compute
    totals.reads_s += reads
    _keep(engine, seconds, compute, reads)
    return 1 if decoding > 0 else 0


@compiled
def _prefill(engine: Engine, budget: int) -> tuple[int, float]:
    """Compute the first prompts of the queue, the last one in part; return the tokens and their quadratic work."""
    totals = engine.totals[0]
    tokens, quadratic = 0, 0.0
    while budget > 0 and totals.queue_first < totals.queue_last:
        request = engine.queue[totals.queue_first % len(engine.queue)]
        taken = int(min(budget, engine.left[request]))
        end = int(engine.prompt[request] + engine.generated[request])
        quadratic += work_of_next(end, int(engine.left[request]), taken)
        engine.left[request] -= taken
        budget -= taken
        tokens += taken
        if engine.left[request] == 0:
            totals.queue_first += 1
            engine.prefilled[totals.prefilled] = request
            totals.prefilled += 1
    totals.pending -= tokens
    return tokens, quadratic


@compiled
def _start_decoding(engine: Engine, cache: Cache, ends: Heap) -> None:
    totals = engine.totals[0]
    for k in range(totals.prefilled):
        request = engine.prefilled[k]
        make_ready(cache, int(engine.leaf[request]))
        # A request that computed tokens which another computed too gives its copy back.
        cache.tokens[0].locked -= int(engine.twice[request])
        cache.tokens[0].free += int(engine.twice[request])
        engine.twice[request] = 0
        engine.state[request] = DECODE
        engine.place[request] = totals.decoding
        engine.decoding[totals.decoding] = request
        totals.decoding += 1
        totals.decoding_kv += int(engine.prompt[request] + engine.generated[request])
        engine.ends[request] = totals.decodes + engine.output[request] - engine.generated[request]
        heappush(ends, (int(engine.ends[request]), int(request)))


@compiled
def _finish(engine: Engine, cache: Cache, heap: Heap, ends: Heap) -> None:
    totals = engine.totals[0]
    while len(ends) > 0 and ends[0][0] <= totals.decodes:
        end, request = heappop(ends)
        if engine.state[request] != DECODE or engine.ends[request] != end:
            continue  # it was retracted since
        _leave(engine, request)
        engine.generated[request] = engine.output[request]
        totals.decoding_kv -= engine.prompt[request] + engine.output[request]
        release(cache, heap, engine.leaf[request], engine.output[request], True)
        engine.state[request] = DONE
        engine.finished[totals.finished] = request
        totals.finished += 1


@compiled
def _make_room_to_decode(engine: Engine, cache: Cache, heap: Heap) -> int:
    """Lock a token for each decoding request, retracting as SGLang does; return how many requests decode.

    Requests with the fewest output tokens are retracted first, and of these the one with the longest prompt.
    """
    totals = engine.totals[0]
    while totals.decoding > 0 and not grow(cache, heap, totals.decoding):
        least, fewest = -1, 0
        for k in range(totals.decoding):
            request = engine.decoding[k]
            got = engine.output[request] - engine.ends[request]
            if least < 0 or (got, -engine.prompt[request]) <= (fewest, -engine.prompt[least]):
                least, fewest = request, got
        _leave(engine, least)
        engine.generated[least] = engine.output[least] - (engine.ends[least] - totals.decodes)
        totals.decoding_kv -= engine.prompt[least] + engine.generated[least]
        release(cache, heap, engine.leaf[least], engine.generated[least], False)
        engine.state[least] = RETRACTED
        engine.retracted[totals.retracted] = least
        totals.retracted += 1
        totals.retractions += 1
    return totals.decoding


@compiled
def _leave(engine: Engine, request: int) -> None:
    totals = engine.totals[0]
    totals.decoding -= 1
    last, hole = engine.decoding[totals.decoding], engine.place[request]
    engine.decoding[hole] = last
    engine.place[last] = hole


@compiled
def _keep(engine: Engine, seconds: float, compute: float, reads: float) -> None:
    """Add the step to the series, where a row covers `series_every` steps."""
    totals, series = engine.totals[0], engine.series
    totals.since_seconds += seconds
    totals.since_compute_s += compute
    totals.since_reads_s += reads
    if totals.steps % totals.series_every == 0:
        row = series[totals.series_length]
        row[0], row[1], row[2] = totals.since_seconds, totals.since_compute_s, totals.since_reads_s
        totals.since_seconds, totals.since_compute_s, totals.since_reads_s = 0.0, 0.0, 0.0
        totals.series_length += 1
        if totals.series_length == len(series):
            for k in range(len(series) // 2):
                series[k] = series[2 * k] + series[2 * k + 1]
            totals.series_length //= 2
            totals.series_every *= 2
