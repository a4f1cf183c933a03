"""Keeps steps of prompts on a CPU short: how fast it computes them shows only in its steps, and grows with the prompt.

What a matrix product takes says too little where a CPU multiplies bfloat16 itself: attention and the rest took most of
a step of 4,096 tokens that lasted 12 s, in which nobody else got a token.
"""

import time
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from engine_ext.plugin.options import mine

LEAST = 64  # tokens of a chunk
SHORT = 1.5  # times which a full step would take less than the most, if it is short
AFTER = 8  # short steps in a row that make the chunk twice as large


def run_batch(original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a step, and size the chunk of the next ones by what it took."""
    began = time.perf_counter()
    found = original(scheduler, batch, *args, **kwargs)
    most_s = mine().cpu_step_s
    if most_s is not None and batch.forward_mode.is_extend() and scheduler.chunked_prefill_size:
        first = scheduler.server_args.chunked_prefill_size
        took_s, tokens = time.perf_counter() - began, int(batch.extend_num_tokens)
        chunk = scheduler.chunked_prefill_size
        is_short = took_s * SHORT < most_s and 2 * tokens > chunk
        short = getattr(scheduler, "batchweave_short_steps", 0) + 1 if is_short else 0
        chunk, scheduler.batchweave_short_steps = next_chunk(chunk, tokens, took_s, most_s, short), short % AFTER
        scheduler.chunked_prefill_size = min(first, -(-chunk // scheduler.page_size) * scheduler.page_size)
    return found


def next_chunk(chunk: int, tokens: int, took_s: float, most_s: float, short: int) -> int:
    """Return the chunk after a step of so many prompt tokens: a power of two by which steps take `most_s` at most.

    `short`: how many full steps in a row were short, with this one.
    """
    if took_s > most_s:  # a step of few tokens says less: the machine may have stood still
        fitting = int(tokens * most_s / took_s) if 2 * tokens > chunk else chunk // 2
        return min(chunk, 1 << max(LEAST, fitting).bit_length() - 1)
    return 2 * chunk if short == AFTER else chunk


HOOKS = [("sglang.srt.managers.scheduler.Scheduler.run_batch", run_batch, HookType.AROUND)]
