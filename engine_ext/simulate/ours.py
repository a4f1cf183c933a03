"""Holds what our scheduler knows of a simulated engine beside the scan's state, and what it is set to."""

from typing import NamedTuple

import numpy as np

from engine_ext.arrays import Bools, Column, Floats
from engine_ext.compiled import compiled
from engine_ext.coserve.slo import Bounds, SloClasses
from engine_ext.costs.engine_model import StepModel
from engine_ext.step.memory import Memory

AHEAD_S = 0.1  # seconds between two entries of `ahead`


class Rules(NamedTuple):
    """Our settings: the classes of online requests, and the most prompt tokens of a step.

    `bounds`: TTFT, TPOT and TBT of each class, float64 [classes, 3]; `percentiles`: the share of its requests that must
    keep them, float64 [classes]; `may_wait`: whether it has no deadlines, bool [classes]. `mixes`: decodes ride in a
    step with prompts. `model`: how long steps really take; what the predictor starts from may be wrong. `reserved`:
    SGLang's first new token ratio.
    """

    bounds: Floats
    percentiles: Floats
    may_wait: Bools
    chunk: int
    mixes: bool
    model: StepModel
    reserved: float


def rules_of(classes: SloClasses, chunk: int, mixes: bool, model: StepModel, reserved: float) -> Rules:
    """Return the settings; a request's class is its place in `classes`."""
    return Rules(
        np.array([each.bounds for each in classes], dtype=np.float64),
        np.array([each.percentile for each in classes], dtype=np.float64),
        np.array([each.may_wait for each in classes], dtype=np.bool_),
        chunk,
        mixes,
        model,
        reserved,
    )


@compiled
def bounds_of(rules: Rules, slo: int) -> Bounds:
    """Return the bounds of one class."""
    return Bounds(rules.bounds[slo, 0], rules.bounds[slo, 1], rules.bounds[slo, 2])


@compiled
def strictest_of(rules: Rules, here: Bools) -> Bounds:
    """Return the bounds of a step beside requests of these classes, or of all if there are none.

    Its TTFT is the shortest of all classes, because a request of any class may come while it runs.
    """
    ttft_s = tpot_s = tbt_s = np.inf
    for slo in range(len(here)):
        ttft_s = min(ttft_s, rules.bounds[slo, 0])
        if here[slo] or not here.any():
            tpot_s, tbt_s = min(tpot_s, rules.bounds[slo, 1]), min(tbt_s, rules.bounds[slo, 2])
    return Bounds(ttft_s, tpot_s, tbt_s)


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
