"""Drives the scan of an engine without online requests."""

from dataclasses import dataclass

import numpy as np

from engine_ext.coserve.limit import NOT_PROFILED
from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import Clock, EngineModel
from engine_ext.costs.hardware import Machine, hardware
from engine_ext.costs.model_shape import preset
from engine_ext.scan.decide import ANY_NUMBER
from engine_ext.step.live import LiveScan
from engine_ext.step.memory import new_memory
from engine_ext.step.view import batches_alone

COST = CostModel(preset("llama-3-8b"), Machine(hardware("a100-80gb")))
MEMORY = new_memory(EngineModel.of_steps(COST, Clock.MIXED).numbers, 1000, NOT_PROFILED)
NOBODY_RESTS = np.zeros(0, dtype=np.bool_)


@dataclass(frozen=True, slots=True)
class Step:
    """The prompt tokens of a step, and the keys of those whom it admits."""

    budget: int
    admitted: list[int]


def decide(
    scan: LiveScan,
    used: int,
    reads: int,
    decoding: int,
    pending: int,
    decoded: int = 1,
    slots: int = ANY_NUMBER,
    now: float = 0.0,
    may_follow: bool = True,
    mixes: bool = True,
) -> Step:
    view = batches_alone(used, reads, decoding, pending, decoded, slots)._replace(mixes=mixes)
    plan, admitted = scan.decide(MEMORY, view, NOBODY_RESTS, now, may_follow)
    return Step(plan.budget, admitted)
