"""What an engine runs so that its steps tell their costs: prompts alone, decodes alone, and both beside each other."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import numpy as np

# Runs one request: its token ids, and how many tokens it is to answer.
Run = Callable[[list[int], int], Awaitable[None]]

REPEATS = 3
DECODES = 24  # steps at each size of a batch
SHORTEST = 64
MOST_BATCH = 512


@dataclass(frozen=True, slots=True)
class Limits:
    """Of the engine: tokens of a request, tokens of KV cache, requests at once, ids of the vocabulary."""

    context: int
    capacity: int
    running: int
    vocabulary: int


async def run_load(run: Run, limits: Limits, seed: int = 0) -> AsyncIterator[str]:
    """Run it all, and say before each part what it is; the first is not to be counted."""
    generator = np.random.default_rng(seed)

    def ids(count: int) -> list[int]:
        return generator.integers(0, limits.vocabulary, count).tolist()

    longest = min(limits.context, limits.capacity) - 2 * DECODES
    if longest < SHORTEST:
        raise ValueError(f"an engine that holds {longest + 2 * DECODES} tokens is too small to be measured")
    sizes = [size for size in (SHORTEST << k for k in range(16)) if size <= longest]
    yield "once through everything, not counted"
    for size in sizes:
        await run(ids(size), 4)
    await asyncio.gather(*(run(ids(SHORTEST), 4) for _ in range(min(limits.running, 16))))
    yield "prompts of " + ", ".join(map(str, sizes)) + " tokens, one at a time"
    for size in sizes * REPEATS:
        await run(ids(size), 1)
    for context in (size for size in sizes if size in (SHORTEST, 512, 4096, 16_384)):
        fits = limits.capacity // (context + 2 * DECODES)
        most = min(limits.running, MOST_BATCH, fits)
        batches = sorted({1, *(4**k for k in range(1, 6) if 4**k <= most), most})
        yield f"decodes of {', '.join(map(str, batches))} requests at {context} tokens"
        for batch in batches:
            await asyncio.gather(*(run(ids(context), DECODES) for _ in range(batch)))
    batch = min(limits.running - 1, 16, limits.capacity // 2 // (sizes[0] + 8 * DECODES))
    if batch > 0:
        yield f"prompts beside decodes of {batch} requests"
        room = limits.capacity // 2
        beside = [size for size in sizes if size <= room]
        await asyncio.gather(
            *(run(ids(SHORTEST), 8 * DECODES) for _ in range(batch)), _one_by_one(run, [ids(size) for size in beside])
        )


async def _one_by_one(run: Run, prompts: list[list[int]]) -> None:
    for prompt in prompts:
        await run(prompt, 1)
