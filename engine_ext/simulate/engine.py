"""One engine, step by step: continuous batching with chunked prefill, a KV cache of fixed size, and retraction."""

from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_ext.compiled import compiled
from engine_ext.costs.engine_model import CLOCK_KIND, COMPUTES_TWICE, READ_S, compute_time, step_time
from engine_ext.plan.tree import Column
from engine_ext.simulate.cache import (
    COMPUTED,
    EVICTABLE,
    FREE,
    LOCKED,
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
)

Floats = NDArray[np.float64]

SERIES = 1 << 16  # steps kept of a run's series; when they are full every other one goes
WAITS, PREFILL, DECODE, DONE, TAKEN_BACK = range(5)

# Places in Engine.counts
(
    STEPS,
    DECODES,
    DECODING,
    DECODING_KV,
    PENDING,
    QUEUE_FIRST,
    QUEUE_LAST,
    PREFILLED,
    FINISHED,
    RETRACTED,
    RETRACTIONS,
    RECOMPUTED,
    SERIES_LENGTH,
    SERIES_EVERY,
    MOST_LOCKED,
) = range(15)
# Places in Engine.sums
SECONDS, COMPUTE_S, READS_S, SINCE_SECONDS, SINCE_COMPUTE, SINCE_READS = range(6)


class Engine(NamedTuple):
    """The engine by request: `leaf` of its prompt, `prompt` and `output` tokens, `generated` so far, `state`.

    `left` and `left_quadratic`: prompt tokens and quadratic work still to compute; `place` in `decoding`; the decode
    step at which it `ends`; `twice`: tokens that it computes beside another request. `queue` holds those in prefill,
    first come first served; `prefilled`, `finished` and `retracted` what the last step did. `series`: seconds, compute
    and reads of stretches of steps.
    """

    leaf: Column
    prompt: Column
    output: Column
    generated: Column
    state: Column
    left: Column
    left_quadratic: Floats
    twice: Column
    place: Column
    ends: Column
    decoding: Column
    queue: Column
    prefilled: Column
    finished: Column
    retracted: Column
    counts: Column
    sums: Floats
    series: Floats


def new_engine(leaf: Column, prompt: Column, output: Column) -> Engine:
    requests = len(leaf)
    counts = np.zeros(15, dtype=np.int64)
    counts[SERIES_EVERY] = 1

    def column() -> Column:
        return np.zeros(requests, dtype=np.int64)

    return Engine(
        leaf=leaf.copy(),
        prompt=prompt.copy(),
        output=np.maximum(output, 1),
        generated=column(),
        state=column(),
        left=column(),
        left_quadratic=np.zeros(requests),
        twice=column(),
        place=column(),
        ends=column(),
        decoding=column(),
        queue=np.zeros(requests + 1, dtype=np.int64),
        prefilled=column(),
        finished=column(),
        retracted=column(),
        counts=counts,
        sums=np.zeros(6),
        series=np.zeros((SERIES, 3)),
    )


def series_of(engine: Engine) -> Floats:
    """Seconds, compute and reads of all stretches of steps so far, the last one shorter; float64 [stretches, 3]."""
    return np.vstack([engine.series[: engine.counts[SERIES_LENGTH]], engine.sums[SINCE_SECONDS:]])


@compiled
def ends_of_decoding(engine: Engine) -> Heap:
    """When each of the decoding requests ends, as a heap."""
    ends = empty_heap()
    for k in range(engine.counts[DECODING]):
        request = engine.decoding[k]
        heappush(ends, (int(engine.ends[request]), int(request)))
    return ends


@compiled
def room_for(cache: Cache, leaf: int) -> int:
    """Tokens that stay free or evictable when the leaf's path is locked."""
    return cache.tokens[FREE] + cache.tokens[EVICTABLE] - unlocked(cache, leaf)


@compiled
def admit(engine: Engine, cache: Cache, heap: Heap, model: Floats, request: int) -> int:
    """Let a request in whose path and generated tokens fit; prompt tokens that it has to compute."""
    counts = engine.counts
    generated = engine.generated[request]
    more, more_quadratic = 0, 0.0
    if model[COMPUTES_TWICE] > 0:
        more, more_quadratic = twice(cache, engine.leaf[request])
    tokens, quadratic = lock(cache, heap, engine.leaf[request])
    grow(cache, heap, generated)
    if more > 0 and grow(cache, heap, more):
        engine.twice[request] = more
        tokens, quadratic = tokens + more, quadratic + more_quadratic
    if engine.state[request] == TAKEN_BACK:
        counts[RECOMPUTED] += tokens + generated
    else:
        cache.tokens[COMPUTED] += tokens
        cache.work[0] += quadratic
    tokens = max(1, tokens + generated)
    end = float(engine.prompt[request])
    quadratic += (end + generated) ** 2 - end**2
    engine.left[request], engine.left_quadratic[request] = tokens, quadratic
    engine.state[request] = PREFILL
    engine.queue[counts[QUEUE_LAST] % len(engine.queue)] = request
    counts[QUEUE_LAST] += 1
    counts[PENDING] += tokens
    return tokens


@compiled
def step(engine: Engine, cache: Cache, heap: Heap, ends: Heap, model: Floats, budget: int) -> int:
    """Run one step with at most `budget` prompt tokens; output tokens that each decoding request has got (0 or 1)."""
    counts, sums = engine.counts, engine.sums
    counts[PREFILLED], counts[FINISHED], counts[RETRACTED] = 0, 0, 0
    alone = model[CLOCK_KIND] == 2.0 and budget > 0 and counts[PENDING] > 0
    decoding = 0 if alone else _make_room_to_decode(engine, cache, heap)
    counts[MOST_LOCKED] = max(counts[MOST_LOCKED], cache.tokens[LOCKED])
    reads = counts[DECODING_KV] * model[READ_S] if decoding > 0 else 0.0
    tokens, quadratic = _prefill(engine, budget)
    if model[COMPUTES_TWICE] > 0 and tokens > 0 and counts[QUEUE_FIRST] < counts[QUEUE_LAST]:
        cut = engine.queue[counts[QUEUE_FIRST] % len(engine.queue)]  # its chunk is in the cache by the next step
        stash(cache, int(engine.leaf[cut]), int(engine.prompt[cut] + engine.generated[cut] - engine.left[cut]))
    compute = compute_time(model, tokens + decoding, quadratic)
    seconds = step_time(model, compute, reads)
    if decoding > 0:
        counts[DECODES] += 1
        counts[DECODING_KV] += decoding
        _finish(engine, cache, heap, ends)
    _start_decoding(engine, cache, ends)
    counts[STEPS] += 1
    sums[SECONDS] += seconds
    sums[COMPUTE_S] += compute
    sums[READS_S] += reads
    _keep(engine, seconds, compute, reads)
    return 1 if decoding > 0 else 0


@compiled
def _prefill(engine: Engine, budget: int) -> tuple[int, float]:
    """Compute the first prompts of the queue, the last one in part."""
    counts = engine.counts
    tokens, quadratic = 0, 0.0
    while budget > 0 and counts[QUEUE_FIRST] < counts[QUEUE_LAST]:
        request = engine.queue[counts[QUEUE_FIRST] % len(engine.queue)]
        taken = int(min(budget, engine.left[request]))
        part = float(engine.left_quadratic[request] * taken / engine.left[request])
        engine.left[request] -= taken
        engine.left_quadratic[request] -= part
        budget -= taken
        tokens += taken
        quadratic += part
        if engine.left[request] == 0:
            counts[QUEUE_FIRST] += 1
            engine.prefilled[counts[PREFILLED]] = request
            counts[PREFILLED] += 1
    counts[PENDING] -= tokens
    return tokens, quadratic


@compiled
def _start_decoding(engine: Engine, cache: Cache, ends: Heap) -> None:
    counts = engine.counts
    for k in range(counts[PREFILLED]):
        request = engine.prefilled[k]
        make_ready(cache, int(engine.leaf[request]))
        # Who computed the same beside it gives its copy back.
        cache.tokens[LOCKED] -= engine.twice[request]
        cache.tokens[FREE] += engine.twice[request]
        engine.twice[request] = 0
        engine.state[request] = DECODE
        engine.place[request] = counts[DECODING]
        engine.decoding[counts[DECODING]] = request
        counts[DECODING] += 1
        counts[DECODING_KV] += engine.prompt[request] + engine.generated[request]
        engine.ends[request] = counts[DECODES] + engine.output[request] - engine.generated[request]
        heappush(ends, (int(engine.ends[request]), int(request)))


@compiled
def _finish(engine: Engine, cache: Cache, heap: Heap, ends: Heap) -> None:
    counts = engine.counts
    while len(ends) > 0 and ends[0][0] <= counts[DECODES]:
        end, request = heappop(ends)
        if engine.state[request] != DECODE or engine.ends[request] != end:
            continue  # it was retracted meanwhile
        _leave(engine, request)
        engine.generated[request] = engine.output[request]
        counts[DECODING_KV] -= engine.prompt[request] + engine.output[request]
        release(cache, heap, engine.leaf[request], engine.output[request], True)
        engine.state[request] = DONE
        engine.finished[counts[FINISHED]] = request
        counts[FINISHED] += 1


@compiled
def _make_room_to_decode(engine: Engine, cache: Cache, heap: Heap) -> int:
    """Lock a token for each decoding request, retracting as SGLang does; how many decode.

    First those that have got least, of these the one with the longest prompt.
    """
    counts = engine.counts
    while counts[DECODING] > 0 and not grow(cache, heap, counts[DECODING]):
        least, fewest = -1, 0
        for k in range(counts[DECODING]):
            request = engine.decoding[k]
            got = engine.output[request] - engine.ends[request]
            if least < 0 or (got, -engine.prompt[request]) <= (fewest, -engine.prompt[least]):
                least, fewest = request, got
        _leave(engine, least)
        engine.generated[least] = engine.output[least] - (engine.ends[least] - counts[DECODES])
        counts[DECODING_KV] -= engine.prompt[least] + engine.generated[least]
        release(cache, heap, engine.leaf[least], engine.generated[least], False)
        engine.state[least] = TAKEN_BACK
        engine.retracted[counts[RETRACTED]] = least
        counts[RETRACTED] += 1
        counts[RETRACTIONS] += 1
    return counts[DECODING]


@compiled
def _leave(engine: Engine, request: int) -> None:
    counts = engine.counts
    counts[DECODING] -= 1
    last, hole = engine.decoding[counts[DECODING]], engine.place[request]
    engine.decoding[hole] = last
    engine.place[last] = hole


@compiled
def _keep(engine: Engine, seconds: float, compute: float, reads: float) -> None:
    """Add the step to the series; a row stands for SERIES_EVERY steps."""
    counts, sums, series = engine.counts, engine.sums, engine.series
    sums[SINCE_SECONDS] += seconds
    sums[SINCE_COMPUTE] += compute
    sums[SINCE_READS] += reads
    if counts[STEPS] % counts[SERIES_EVERY] == 0:
        series[counts[SERIES_LENGTH]] = sums[SINCE_SECONDS:]
        sums[SINCE_SECONDS:] = 0.0
        counts[SERIES_LENGTH] += 1
        if counts[SERIES_LENGTH] == len(series):
            for k in range(len(series) // 2):
                series[k] = series[2 * k] + series[2 * k + 1]
            counts[SERIES_LENGTH] //= 2
            counts[SERIES_EVERY] *= 2
