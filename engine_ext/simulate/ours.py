"""Holds what our scheduler knows of a simulated engine beside the scan's state, and what it is set to."""

from typing import NamedTuple

from engine_ext.arrays import Bools, Column, Floats
from engine_ext.coserve.slo import Bounds
from engine_ext.costs.engine_model import StepModel
from engine_ext.step.memory import Memory

AHEAD_S = 0.1  # seconds between two entries of `ahead`


class Rules(NamedTuple):
    """Our settings: the online class's bounds, and the most prompt tokens of a step.

    `percentile`: the share of online requests that must keep the bounds. `mixes`: decodes ride in a step with prompts.
    `model`: how long steps really take; what the predictor starts from may be wrong. `reserved`: SGLang's first new
    token ratio.
    """

    bounds: Bounds
    percentile: float
    chunk: int
    mixes: bool
    model: StepModel
    reserved: float


class Ours(NamedTuple):
    """What our scheduler knows beside the scan's state; arrays that change in place.

    `kv`, `skipped`, `rests`, `batch`: by decode of the batch. `decoded`: output tokens of each decode that the scan has
    not been told. `arrived_excess_s`, `first_excess_s`: the seconds by which batches had made steps longer when each
    online request came, and at its first token; float64 [requests]. `ratio`: SGLang's new token ratio, float64 [1].
    `ahead`: the most KV tokens that online requests will hold within a second, by steps of AHEAD_S; empty for a
    scheduler that cannot know.
    """

    memory: Memory
    kv: Column
    skipped: Column
    batch: Column
    rests: Bools
    decoded: Column
    arrived_excess_s: Floats
    first_excess_s: Floats
    ratio: Floats
    ahead: Column
