"""Drives the scan of an engine without online requests: one that plans, or one of a plan that is given."""

from dataclasses import dataclass

import numpy as np

from engine_ext.arrays import Column
from engine_ext.coserve.limit import NOT_PROFILED
from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import Clock, EngineModel
from engine_ext.costs.hardware import Machine, hardware
from engine_ext.costs.model_shape import preset
from engine_ext.scan.decide import ANY_NUMBER, DualScan
from engine_ext.scan.decide import decide as decide_of_scan
from engine_ext.step.live import LiveScan
from engine_ext.step.memory import new_memory
from engine_ext.step.view import batches_alone

COST = CostModel(preset("llama-3-8b"), Machine(hardware("a100-80gb")))
MEMORY = new_memory(EngineModel.of_steps(COST, Clock.MIXED).numbers, 1000, NOT_PROFILED)
NOBODY_RESTS = np.zeros(0, dtype=np.bool_)


@dataclass(frozen=True, slots=True)
class Step:
    """The prompt tokens of a step, and the keys of the requests that it admits."""

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
    """Decide a step; `used` has what is `pending`."""
    view = batches_alone(used - pending, reads, decoding, pending, decoded, slots)._replace(mixes=mixes)
    plan, admitted = scan.decide(MEMORY, view, NOBODY_RESTS, now, may_follow)
    return Step(plan.budget, admitted)


@dataclass(frozen=True, slots=True)
class Decided:
    """What the scan said: the prompt tokens of the step, and the requests that it admitted."""

    budget: int
    admitted: Column


def ask_scan(
    scan: DualScan,
    used_kv: int,
    decoding_kv: int,
    decoding: int,
    pending: int,
    decoded: int = 1,
    slots: int = ANY_NUMBER,
    most: int = ANY_NUMBER,
) -> Decided:
    budget, count = decide_of_scan(scan.state, used_kv, decoding_kv, decoding, pending, decoded, slots, most)
    return Decided(budget, scan.state.admitted[:count].copy())
