"""Runs the load of a calibration: prompts alone, decodes alone, and both together, so that steps show their costs.

A second load, with as much compute as reads, shows which way of overlapping prompts and decodes is the fastest.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from engine_ext.costs.cost import CostModel
from engine_ext.errors import EngineError

# Runs one request, given its token ids and the number of output tokens.
Run = Callable[[list[int], int], Awaitable[None]]

REPEATS = 3
DECODES = 24  # steps for each batch size
SHORTEST = 64
MOST_BATCH = 512


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of an engine: tokens per request, tokens of KV cache, requests at once, and vocabulary size."""

    context: int
    capacity: int
    running: int
    vocabulary: int


async def measure_steps(engine: Any, steps: Path, longest: int | None = None) -> AsyncIterator[str]:
    """Run `run_load` on an SGLang Engine of this process, whose options name the file `steps`.

    At the end the file holds the steps that count. `longest`: tokens of the longest request, where long ones take too
    much time.
    """

    async def run(ids: list[int], tokens: int) -> None:
        await _answer(engine, ids, tokens)

    parts = 0
    limits = await _limits(engine)
    limits = replace(limits, context=min(limits.context, longest or limits.context))
    async for part in run_load(run, limits):
        parts += 1
        if parts == 2:  # the steps before this were compiling and loading
            await engine.tokenizer_manager.get_internal_state()  # which writes the buffered steps
            steps.unlink(missing_ok=True)
        yield part
    await engine.tokenizer_manager.get_internal_state()


async def time_blend(
    engine: Any, cost: CostModel, seconds: float, marks: Callable[[int], dict[str, Any]], limit_s: float | None
) -> float:
    """Return how many seconds an SGLang Engine takes to run `blend`.

    `marks`: returns the custom parameters that mark a request with so many output tokens as a batch's. Raises
    TimeoutError after `limit_s`.
    """
    limits, generator = await _limits(engine), np.random.default_rng(0)
    requests = [(generator.integers(0, limits.vocabulary, a).tolist(), b) for a, b in blend(cost, limits, seconds)]

    async def run(some: list[tuple[list[int], int]]) -> float:
        started = time.perf_counter()
        await asyncio.gather(*(_answer(engine, ids, tokens, custom_params=marks(tokens)) for ids, tokens in some))
        return time.perf_counter() - started

    await run(requests[:: max(1, len(requests) // 8)])  # to warm up
    if not (await engine.tokenizer_manager.flush_cache(timeout_s=30)).success:
        raise EngineError("SGLang did not empty its cache between two runs")
    async with asyncio.timeout(limit_s):
        return await run(requests)


async def _answer(engine: Any, ids: list[int], tokens: int, **more: Any) -> None:
    sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0, **more}
    await engine.async_generate(input_ids=ids, sampling_params=sampling)


async def _limits(engine: Any) -> Limits:
    manager = engine.tokenizer_manager
    states = await manager.get_internal_state()
    return Limits(
        context=int(manager.model_config.context_len),
        capacity=min(int(state["batchweave"]["kv_capacity"]) for state in states),
        running=min(int(state["effective_max_running_requests_per_dp"]) for state in states),
        vocabulary=int(manager.model_config.vocab_size),
    )


async def run_load(run: Run, limits: Limits, seed: int = 0) -> AsyncIterator[str]:
    """Run the whole load, and yield a description before each part; the first part must not be counted."""
    generator = np.random.default_rng(seed)

    def ids(count: int) -> list[int]:
        return generator.integers(0, limits.vocabulary, count).tolist()

    longest = min(limits.context, limits.capacity) - 2 * DECODES
    if longest < SHORTEST:
        raise EngineError(f"an engine that holds {longest + 2 * DECODES} tokens is too small to be measured")
    sizes = [size for size in (SHORTEST << k for k in range(16)) if size <= longest]
    yield "a warm-up with all sizes, not counted"
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
        yield f"decodes of {', '.join(map(str, batches))} requests with {context} tokens each"
        for batch in batches:
            await asyncio.gather(*(run(ids(context), DECODES) for _ in range(batch)))
    batch = min(limits.running - 1, 16, limits.capacity // 2 // (sizes[0] + 8 * DECODES))
    if batch > 0:
        yield f"prompts together with decodes of {batch} requests"
        room = limits.capacity // 2
        beside = [size for size in sizes if size <= room]
        await asyncio.gather(
            *(run(ids(SHORTEST), 8 * DECODES) for _ in range(batch)), _one_by_one(run, [ids(size) for size in beside])
        )


DENSE, LIGHT = (1024, 8), (64, 1024)  # prompt and output tokens
MOST_BLENDED = 20_000


def blend(cost: CostModel, limits: Limits, seconds: float) -> list[tuple[int, int]]:
    """Return (prompt, output) tokens of interleaved requests that compute for `seconds` and read for `seconds`."""
    room = min(limits.context, limits.capacity // 2)
    (prompt, few), (short, many) = ((min(a, room - room // 8), min(b, room // 8)) for a, b in (DENSE, LIGHT))
    dense_s = prompt * cost.gemm_s_per_token + prompt**2 * cost.quadratic_s
    light_s = (short * many + many**2 / 2) * cost.read_s_per_token
    dense, light = (min(MOST_BLENDED, max(1, round(seconds / each))) for each in (dense_s, light_s))
    turns = sorted(
        [((k + 0.5) / dense, prompt, few) for k in range(dense)]
        + [((k + 0.5) / light, short, many) for k in range(light)]
    )
    return [(prompt_tokens, output_tokens) for _, prompt_tokens, output_tokens in turns]


async def _one_by_one(run: Run, prompts: list[list[int]]) -> None:
    for prompt in prompts:
        await run(prompt, 1)
