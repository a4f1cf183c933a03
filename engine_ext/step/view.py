"""Holds what a step may know of its engine, be it SGLang's or a simulated one: numbers and arrays alone."""

import math
from typing import NamedTuple

import numpy as np

from engine_ext.arrays import Column
from engine_ext.coserve.predictor import Load
from engine_ext.coserve.slo import Bounds
from engine_ext.scan.decide import ANY_NUMBER


class Online(NamedTuple):
    """What online requests need of a step; tokens, if not said otherwise.

    `decoding`, `due`: how many of them decode, and how many have prompts that wait or are being computed; of either,
    those that have deadlines. `prompts`: whose prompts wait or are being computed, with a deadline or not; `waiting`:
    how many of these are not admitted. `tokens`: prompt tokens that they still have to compute, up to the largest step;
    `due_tokens`: of those with deadlines. `before`: those of the first prompt that are computed. `kv`: KV tokens that
    the prompts which the step reaches will take. `first`: those that must be free for the prompt that is being computed
    and for the first that waits. `reserved`: KV tokens that the engine reserves for answers to come. `slack_s`: the
    least time until the next token of one that decodes is due, less what still runs; `first_slack_s`: until the first
    token of one of the prompts.
    """

    decoding: int
    due: int
    prompts: int
    waiting: int
    tokens: int
    due_tokens: int
    before: int
    kv: int
    first: int
    reserved: int
    slack_s: float
    first_slack_s: float


class Chunk(NamedTuple):
    """The prompt that the engine computes in chunks, of which `left` tokens are not computed yet and `computed` are.

    `left` is 0 if there is none. `is_ours`: it is of a batch; `can_park`: it can be stopped where it is; `may_park`:
    and it has not made way for others too often; `can_yield`: the engine can leave a part of its step to others.
    """

    left: int
    computed: int
    is_ours: bool
    can_park: bool
    may_park: bool
    can_yield: bool


class View(NamedTuple):
    """What a step may know; tokens, if not said otherwise.

    `is_limited`: online requests bound the step, with the `bounds` of those that are there. `fixed`: the decodes that
    are in any step. `kv`, `skipped`: by decode of a batch that the step may leave out, int64 [decodes], the KV tokens
    that it reads and for how many steps running it was left out. `decoding`, `reads`: all requests that decode, and the
    KV tokens that they read. `decoded`: output tokens that each of them has got since the last decision. `used`: of the
    KV cache, without what the chunk has left and what only pins keep; `kept_free`: of it, for online requests to come;
    `page`: its pages. `slots`: requests that may still be admitted. `largest`: prompt tokens of the largest step.
    `mixes`: decodes ride in a step with prompts.
    """

    online: Online
    chunk: Chunk
    is_limited: bool
    bounds: Bounds
    fixed: Load
    kv: Column
    skipped: Column
    decoding: int
    reads: int
    decoded: int
    used: int
    kept_free: int
    page: int
    slots: int
    largest: int
    mixes: bool


NO_ONLINE = Online(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, math.inf, math.inf)
NO_CHUNK = Chunk(0, 0, False, False, False, False)
NO_BOUNDS = Bounds(math.inf, math.inf, math.inf)
NO_LOAD = Load(0, 0.0, 0, 0, 0)
NO_DECODES: Column = np.zeros(0, dtype=np.int64)


def batches_alone(
    used: int, reads: int, decoding: int, pending: int, decoded: int = 1, slots: int = ANY_NUMBER, largest: int = 8192
) -> View:
    """Return the view of an engine without online requests; `pending`: what a prompt in chunks has to compute."""
    return View(
        NO_ONLINE,
        Chunk(pending, 0, True, True, True, True),
        False,
        NO_BOUNDS,
        NO_LOAD,
        NO_DECODES,
        NO_DECODES,
        decoding,
        reads,
        decoded,
        used,
        0,
        1,
        slots,
        largest,
        True,
    )
