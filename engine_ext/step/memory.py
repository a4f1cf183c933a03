"""Remembers from step to step, beside the scan's state, how long steps take and what online requests got."""

from typing import NamedTuple

import numpy as np

from engine_ext.arrays import Bools, Floats
from engine_ext.compiled import compiled
from engine_ext.coserve.governor import Governor, new_governor, note_step
from engine_ext.coserve.limit import Profiled
from engine_ext.coserve.predictor import Load, Predictor, new_predictor, observe, predict
from engine_ext.coserve.reserve import OnlineKv, new_online_kv
from engine_ext.costs.engine_model import StepModel
from engine_ext.step.tuning import MOST_OWED_S


class Memory(NamedTuple):
    """What a step remembers; arrays that change in place.

    `least_share`: the part of the time that batches get in any case; `owed_s`: the seconds that they are owed of it,
    float64 [1]. `in_vain`: whether online prompts waited for the last step, which computed none of them, bool [1].
    """

    predictor: Predictor
    governor: Governor
    held: OnlineKv
    profiled: Profiled
    least_share: float
    owed_s: Floats
    in_vain: Bools


def new_memory(model: StepModel, capacity: int, profiled: Profiled, least_share: float = 0.0) -> Memory:
    """Return what is known before the first step; `capacity`: KV tokens."""
    return Memory(
        new_predictor(model),
        new_governor(),
        new_online_kv(capacity),
        profiled.numbers(),
        float(least_share),
        np.zeros(1),
        np.zeros(1, dtype=np.bool_),
    )


@compiled
def note_launch(memory: Memory, load: Load, theirs: Load) -> None:
    """Note the step that runs now, and the online requests' part of it: what batches get of it, they are not owed."""
    memory.in_vain[0] &= theirs.prompt_tokens == 0
    if memory.least_share > 0.0:
        paid_s = predict(memory.predictor, load) - predict(memory.predictor, theirs)
        memory.owed_s[0] = max(0.0, memory.owed_s[0] - max(0.0, paid_s))


@compiled
def learn(memory: Memory, load: Load, theirs: Load, took_s: float) -> None:
    """Learn from a step of this load that took so many seconds, of which `theirs` was for online requests."""
    note_step(memory.governor, took_s, predict(memory.predictor, theirs), predict(memory.predictor, load))
    observe(memory.predictor, load, took_s)
    memory.owed_s[0] = min(memory.owed_s[0] + memory.least_share * took_s, MOST_OWED_S)
