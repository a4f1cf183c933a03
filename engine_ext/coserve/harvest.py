"""Chooses what a step does for batches beside online requests, within the step's limit in seconds.

Online work comes first, and the limit says what is left (HyGen algorithm 1). Prompt tokens whose GEMM hides behind
reading the weights cost next to nothing, so they have their place before the decodes; then decode as many requests as
fit, those with the least KV cache first (OOCO algorithm 2), and prompts have the rest.
"""

from typing import NamedTuple

import numpy as np

from engine_ext.arrays import Bools, Column
from engine_ext.compiled import compiled
from engine_ext.coserve.predictor import Load, Predictor, longest_chunk, with_chunk, with_decodes, with_margin
from engine_ext.coserve.tuning import AGE, MOST_SKIPPED
from engine_ext.costs.engine_model import StepModel


class Harvest(NamedTuple):
    """What a step does for batches: how many decodes it leaves out, and the most prompt tokens that it computes."""

    left_out: int
    prompt_tokens: int


@compiled
def harvest(
    predictor: Predictor,
    online: Load,
    kv: Column,
    skipped: Column,
    rests: Bools,
    limit_s: float,
    before: int,
    most: int,
) -> Harvest:
    """Choose the batches' part of a step, and write into `rests` which of their decodes it leaves out.

    `online`: what the step does for online requests. `kv`, `skipped`: by decode of a batch, int64 [decodes], the KV
    tokens that it reads and for how many steps running it was left out. `before`: the computed tokens of the prompt
    that is next. `most`: the most prompt tokens that the step has room for.
    """
    riding = min(most, riding_tokens(predictor.model, online.prompt_tokens + online.decoding + len(kv)))
    beside = with_chunk(online, before, riding) if riding > 0 else online
    if with_margin(predictor, beside) > limit_s:
        riding = longest_chunk(predictor, online, before, limit_s, riding)
        beside = with_chunk(online, before, riding) if riding > 0 else online
    rests[:] = False
    count, tokens = len(kv), int(kv.sum())
    if with_margin(predictor, with_decodes(beside, count, tokens)) > limit_s:
        count, tokens = _longest_prefix(predictor, beside, kv, skipped, rests, limit_s)
    load = with_decodes(online, count, tokens)
    return Harvest(len(kv) - count, max(riding, longest_chunk(predictor, load, before, limit_s, most)))


@compiled
def riding_tokens(model: StepModel, tokens: int) -> int:
    """Return how many prompt tokens hide their GEMM behind reading the weights, beside `tokens` others."""
    return max(0, int(model.weights_s / model.gemm_s) - tokens) if model.clock != 2 else 0


@compiled
def _longest_prefix(
    predictor: Predictor, beside: Load, kv: Column, skipped: Column, rests: Bools, limit_s: float
) -> tuple[int, int]:
    """Take as many decodes as fit, in their order; return how many, and the KV tokens that they read."""
    order = np.argsort(np.where(skipped >= MOST_SKIPPED, -(1 << 40) - skipped, kv - AGE * skipped), kind="mergesort")
    sums = np.cumsum(kv[order])
    least, most = 0, len(kv) - 1
    while least < most:
        count = (least + most + 1) // 2
        if with_margin(predictor, with_decodes(beside, count, int(sums[count - 1]))) <= limit_s:
            least = count
        else:
            most = count - 1
    for place in range(least, len(kv)):
        rests[order[place]] = True
    return least, int(sums[least - 1]) if least > 0 else 0
