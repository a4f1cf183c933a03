"""Drives a simulated engine by BlendServe's dual scan as it is printed (algorithm 3)."""

from typing import NamedTuple

import numpy as np

from engine_ext.arrays import Column, Floats
from engine_ext.compiled import compiled
from engine_ext.costs.engine_model import StepModel
from engine_ext.scan.tuning import ALIGNMENT
from engine_ext.simulate.cache import Cache, Heap, empty_heap
from engine_ext.simulate.engine import Engine, admit, room_for, step

HEADS = 64  # requests at an end of the scan whose means describe it
SPLIT_EVERY = 16  # steps


class PaperBlend(NamedTuple):
    """Holds BlendServe's scan: the `sample`, which runs first, and the `scan` from left to right.

    `again` holds retracted requests. By request: `expected` output, seconds of `compute` and `memory` reads, `fresh`
    prompt tokens, the `side` it was taken from. By side: `kv` tokens in use, prefill tokens `owed`, requests that
    `decode`; `split` is [[M_L, C_L], [M_R, C_R]]. `at` says how far sample, left end and right end are taken, and how
    many requests `again` holds.
    """

    sample: Column
    scan: Column
    again: Column
    expected: Floats
    compute: Floats
    memory: Floats
    fresh: Column
    side: Column
    kv: Column
    owed: Floats
    decode: Column
    split: Floats
    at: Column


def new_paper_blend(
    sample: Column, scan: Column, expected: Floats, compute: Floats, memory: Floats, fresh: Column
) -> PaperBlend:
    requests = len(expected)
    return PaperBlend(
        sample,
        scan,
        np.zeros(requests, dtype=np.int64),
        expected,
        compute,
        memory,
        fresh,
        np.zeros(requests, dtype=np.int64),
        np.zeros(2, dtype=np.int64),
        np.zeros(2),
        np.zeros(2, dtype=np.int64),
        np.zeros((2, 2)),
        np.array([0, 0, len(scan), 0], dtype=np.int64),
    )


@compiled
def run_blendserve(engine: Engine, cache: Cache, model: StepModel, blend: PaperBlend, usable: float) -> None:
    """Run algorithm 3: KV memory split by density, a prefill budget per side, steps in multiples of 128.

    The sample runs first. `usable` is the share of the KV memory that is M, which the two sides are to hold on average.
    """
    heap, ends = empty_heap(), empty_heap()
    totals, split = engine.totals[0], blend.split
    compute, memory = blend.compute[blend.scan].sum(), blend.memory[blend.scan].sum()
    root = compute / memory if memory > 0 else 1.0
    done, tick = 0, 0
    while done < len(engine.leaf):
        if tick % SPLIT_EVERY == 0:
            _split_memory(blend, engine, root, usable * model.capacity)
        tick += 1
        tokens = split[0, 1] + split[1, 1] + totals.decoding
        chunk = max(ALIGNMENT, int(tokens / ALIGNMENT + 0.5) * ALIGNMENT - totals.decoding)
        for side in range(2):
            blend.owed[side] = min(blend.owed[side], 0.0) + split[side, 1]
            _admit_side(engine, cache, heap, model, blend, side, chunk)
        decoded = step(engine, cache, heap, ends, model, chunk)
        for k in range(totals.retracted):  # before the others decoded
            request = engine.retracted[k]
            blend.kv[blend.side[request]] -= engine.prompt[request] + engine.generated[request]
            blend.decode[blend.side[request]] -= 1
            blend.again[blend.at[3]] = request
            blend.at[3] += 1
        for side in range(2):
            blend.kv[side] += decoded * blend.decode[side]
        for k in range(totals.finished):
            request = engine.finished[k]
            blend.kv[blend.side[request]] -= engine.prompt[request] + engine.output[request]
            blend.decode[blend.side[request]] -= 1
            done += 1
        for k in range(totals.prefilled):
            blend.decode[blend.side[engine.prefilled[k]]] += 1


@compiled
def _admit_side(
    engine: Engine, cache: Cache, heap: Heap, model: StepModel, blend: PaperBlend, side: int, chunk: int
) -> None:
    """Admit what the side's memory and budget allow; the sample and retracted requests need only room."""
    totals, at = engine.totals[0], blend.at
    while True:
        request, whence = _next_of(blend, side)
        if request < 0:
            return
        size = engine.prompt[request] + engine.generated[request]
        alone = totals.decoding + totals.pending == 0
        if totals.pending >= chunk and not alone:
            return
        if room_for(cache, int(engine.leaf[request])) - engine.generated[request] < totals.decoding + 1:
            return
        full = blend.owed[side] <= 0 or blend.kv[side] + size > blend.split[side, 0]
        if whence in (1, 2) and full and not alone:
            return
        at[whence] += 1 if whence < 2 else -1
        blend.side[request] = side
        blend.kv[side] += size
        blend.owed[side] -= admit(engine, cache, heap, model, int(request))


@compiled
def _next_of(blend: PaperBlend, side: int) -> tuple[int, int]:
    """Return the next request for this side, and the index in `at` that it is taken from; -1 if there is none."""
    at = blend.at
    if at[0] < len(blend.sample):
        return int(blend.sample[at[0]]), 0
    if at[3] > 0:
        return int(blend.again[at[3] - 1]), 3
    if at[1] == at[2]:
        return -1, 0
    return (int(blend.scan[at[1]]), 1) if side == 0 else (int(blend.scan[at[2] - 1]), 2)


@compiled
def _split_memory(blend: PaperBlend, engine: Engine, root: float, capacity: float) -> None:
    """Take steps 1 to 3 of algorithm 3, from the means of the first requests at each end."""
    density, prompts, outputs, news = np.zeros(2), np.ones(2), np.ones(2), np.ones(2)
    left, right = blend.at[1], blend.at[2]
    if left == right:
        return  # retracted requests keep the last budgets
    for side in range(2):
        first, last = (left, min(right, left + HEADS)) if side == 0 else (max(left, right - HEADS), right)
        if first < last:
            chosen = blend.scan[first:last]
            memory = blend.memory[chosen].sum()
            density[side] = blend.compute[chosen].sum() / memory if memory > 0 else 1e9
            prompts[side] = engine.prompt[chosen].mean()
            outputs[side] = max(1.0, blend.expected[chosen].mean())
            news[side] = max(1.0, blend.fresh[chosen].mean())
    share = 0.5
    if density[0] > density[1]:
        share = min(1.0, max(0.0, (root - density[1]) / (density[0] - density[1])))
    for side in range(2):
        memory = capacity * (share if side == 0 else 1 - share)
        decoding = memory / (prompts[side] + outputs[side] / 2)
        blend.split[side, 1] = decoding * news[side] / outputs[side]
        blend.split[side, 0] = max(memory, prompts[side] + outputs[side])
