"""Simulates SGLang 0.5.17's own scheduler: requests in order of arrival, or by longest cached prefix.

First come, first served: prefill runs before decode, as long as admitted requests fit beside a part of the outputs that
are still to come. That part is the new token ratio. It falls with every decode step and rises after retractions;
retracted requests go to the end of the queue.
"""

from typing import NamedTuple

import numpy as np

from engine_ext.arrays import Column, Floats
from engine_ext.compiled import compiled
from engine_ext.costs.engine_model import StepModel
from engine_ext.simulate.cache import Cache, Heap, empty_heap, missing, touch, twice
from engine_ext.simulate.engine import Engine, admit, room_for, step

LOOKED_AT = 128  # waiting requests above which lpm is fcfs; also those whose prefixes count as used
LEAST_RATIO = 0.14  # as a part of the first ratio
DECAY_STEPS = 600
RETRACT_STEPS = 20
CLIP = 4096  # most output tokens reserved for one request
SPARE = 2  # tokens reserved on top: the one that the prefill generates, and a page
IN_BATCH = 32  # tokens: a request waits for a prefix this long that an earlier one in the queue will compute


class WaitingLine(NamedTuple):
    """The waiting queue: a ring of requests, each in it at most once; `ends` says where it begins and ends."""

    ring: Column
    ends: Column


class Admissions(NamedTuple):
    """Records admissions: the `order` of first admission, the prompt tokens `cached` then, and their `number`."""

    order: Column
    cached: Column
    number: Column


@compiled
def run_stock(
    engine: Engine, cache: Cache, model: StepModel, order: Column, expected: Floats, chunk: int, ratio: float, lpm: bool
) -> Admissions:
    """Run all requests, which wait in this order; return their admissions.

    `chunk` is the prompt tokens per step, `expected` the output tokens by request, `ratio` the new token ratio at the
    start.
    """
    heap, ends = empty_heap(), empty_heap()
    line = WaitingLine(np.append(order, 0), np.array([0, len(order)]))
    totals, first_ratio, full = engine.totals[0], ratio, False
    admissions = Admissions(np.empty_like(order), np.full(len(order), -1), np.zeros(1, dtype=np.int64))
    shrinks, done = False, 0
    while done < len(order):
        if not full:
            full = _admit_some(engine, cache, heap, model, line, admissions, expected, chunk, ratio, lpm)
        decoded = step(engine, cache, heap, ends, model, chunk)
        done += totals.finished
        for k in range(totals.retracted):
            request = engine.retracted[k]
            line.ring[line.ends[1] % len(line.ring)] = request
            line.ends[1] += 1
        # A finished request leaves the batch at the next decode step, and only then are others considered.
        if shrinks or totals.retracted > 0 or totals.decoding + totals.pending == 0:
            full = False
        shrinks = totals.finished > 0
        if totals.retracted > 0:
            ratio = _ratio_after_retraction(engine, expected)
        elif decoded > 0:
            ratio = max(ratio - first_ratio * (1 - LEAST_RATIO) / DECAY_STEPS, first_ratio * LEAST_RATIO)
    return admissions


@compiled
def _admit_some(
    engine: Engine,
    cache: Cache,
    heap: Heap,
    model: StepModel,
    line: WaitingLine,
    admissions: Admissions,
    expected: Floats,
    chunk: int,
    ratio: float,
    lpm: bool,
) -> bool:
    """Admit requests that fit; return whether the next one did not."""
    totals = engine.totals[0]
    waiting = line.ends[1] - line.ends[0]
    if waiting == 0 or totals.pending >= chunk:
        return False
    if lpm and waiting <= LOOKED_AT:
        _sort_by_match(engine, cache, line)
    # SGLang looks up all waiting requests in its cache each time; so does this where it is compared with SGLang.
    marked = waiting if model.computes_twice else min(waiting, LOOKED_AT)
    for at in range(line.ends[0], line.ends[0] + marked):
        touch(cache, int(engine.leaf[line.ring[at % len(line.ring)]]))
    reserved = ratio * to_come(engine, expected)
    running = totals.decoding + totals.queue_last - totals.queue_first
    while totals.pending < chunk and line.ends[0] < line.ends[1]:
        request = int(line.ring[line.ends[0] % len(line.ring)])
        leaf = int(engine.leaf[request])
        own = _still(float(expected[request]), int(engine.generated[request]))
        room = room_for(cache, leaf) - engine.generated[request]
        if model.computes_twice:
            room -= twice(cache, leaf)[0]
        if room <= own + SPARE + reserved and (running > 0 or room < 1):
            return True
        line.ends[0] += 1
        computed = admit(engine, cache, heap, model, request)
        if admissions.cached[request] < 0:
            admissions.cached[request] = engine.prompt[request] - computed
            admissions.order[admissions.number[0]] = request
            admissions.number[0] += 1
        reserved += own + SPARE  # in full until the next pass
        running += 1
    return False


@compiled
def to_come(engine: Engine, expected: Floats) -> float:
    """Return the output tokens that are still reserved for running requests."""
    totals, tokens = engine.totals[0], 0.0
    for k in range(totals.decoding):
        request = engine.decoding[k]
        got = int(engine.output[request] - (engine.ends[request] - totals.decodes))
        tokens += _still(float(expected[request]), got)
    for at in range(totals.queue_first, totals.queue_last):
        request = engine.queue[at % len(engine.queue)]
        tokens += _still(float(expected[request]), int(engine.generated[request]))
    return tokens


@compiled
def _still(expected: float, got: int) -> float:
    return max(0.0, min(expected - got, CLIP))


@compiled
def _ratio_after_retraction(engine: Engine, expected: Floats) -> float:
    totals = engine.totals[0]
    got, most = 0.0, 1.0
    for k in range(totals.decoding):
        request = engine.decoding[k]
        got += float(engine.output[request] - (engine.ends[request] - totals.decodes) + RETRACT_STEPS)
        most += float(expected[request])
    return min(1.0, got / most)


@compiled
def _sort_by_match(engine: Engine, cache: Cache, line: WaitingLine) -> None:
    """Sort by longest cached prefix; requests that share an uncached prefix with an earlier one come last."""
    first, size = line.ends[0], line.ends[1] - line.ends[0]
    waiting = np.empty(size, dtype=np.int64)
    matched = np.empty(size, dtype=np.int64)
    brought = np.zeros(len(cache.parent), dtype=np.bool_)
    for k in range(size):
        request = line.ring[(first + k) % len(line.ring)]
        leaf = int(engine.leaf[request])
        waiting[k] = request
        matched[k] = engine.prompt[request] - missing(cache, leaf) - twice(cache, leaf)[0]
        if matched[k] <= IN_BATCH:
            common, node = engine.prompt[request], leaf
            while node != 0 and not brought[node]:
                common -= cache.size[node]
                node = cache.parent[node]
            if common >= IN_BATCH:
                matched[k] = -1
            else:
                node = leaf
                while node != 0 and not brought[node]:
                    brought[node] = True
                    node = cache.parent[node]
    places = np.argsort(-matched, kind="mergesort")
    for k in range(size):
        line.ring[(first + k) % len(line.ring)] = waiting[places[k]]
