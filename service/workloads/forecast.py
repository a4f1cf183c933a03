"""Runs policies over a file on a simulated engine, one after another."""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from engine_ext.costs.calibrate import Calibration
from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import EngineModel
from engine_ext.errors import TooLarge
from engine_ext.plan.lengths import UNKNOWN
from engine_ext.plan.prompts import Prompts
from engine_ext.simulate.policies import POLICIES, Outcome, Policy, prepare, run, simulate
from service.errors import WorkloadError
from service.workloads.fitting import CLOCKS, as_measured
from service.workloads.workload import Workload

OWN: Mapping[str, Policy] = POLICIES  # what `batchweave simulate` compares
COLUMNS = (
    "policy",
    "setting",
    "seconds",
    "tokens_per_s",
    "share_of_ideal",
    "share_of_practical",
    "sharing",
    "sharing_kept",
    "retractions",
    "recomputed_tokens",
    "steps",
    "planner_s",
)


def row_of(outcome: Outcome) -> dict[str, Any]:
    """Return what `--json` prints for one run."""
    return {name: getattr(outcome, name) for name in COLUMNS}


def check_options(names: Sequence[str], policies: Collection[str], *clocks: str) -> None:
    """Check the names of policies and clocks. Raises WorkloadError for an unknown one."""
    if not names:
        raise WorkloadError(f"no policies are named; choose from {', '.join(policies)}")
    for clock in clocks:
        if clock not in CLOCKS:
            raise WorkloadError(f"no clock {clock!r}; choose from {', '.join(CLOCKS)}")
    for name in names:
        if name not in policies:
            raise WorkloadError(f"no policy {name!r}; choose from {', '.join(policies)}")


def forecast(
    workload: Workload,
    cost: CostModel,
    names: Sequence[str],
    policies: Mapping[str, Policy],
    clock: str,
    interference: float,
    sample: float,
    seed: int,
    calibration: Calibration | None = None,
) -> Iterator[Outcome]:
    """Run the named policies one after another. Raises WorkloadError if a true output length is missing.

    With a calibration, the bounds and the planner also use the measured step times.
    """
    if calibration is not None:
        cost = as_measured(cost, calibration)
    model = EngineModel.of(cost, CLOCKS[clock], interference)
    if calibration is not None:
        model = calibration.model(model.capacity, model.clock)
    outputs = workload.outputs
    if np.any(outputs.known == UNKNOWN):
        missing = workload.ids[int(np.argmax(outputs.known == UNKNOWN))]
        raise WorkloadError(f"a simulation needs the output length of every request; {missing!r} has none")
    if not 0 < sample <= 1:
        raise WorkloadError(f"the share to sample must be above 0 and at most 1, not {sample}")
    # A small run first, so that compiling does not count as planning.
    small = prepare(Prompts.of([[1, 2], [1, 3]]), np.array([2, 2]), cost, np.array([9, 9]), sample=1.0)
    simulate(small, model, "batchweave")
    work = prepare(
        workload.prompts, outputs.known, cost, outputs.caps, outputs.kinds, sample, seed, clock=time.perf_counter
    )
    for name in names:
        try:
            yield run(work, model, policies[name], seed)
        except TooLarge as error:
            raise WorkloadError(f"{workload.ids[error.number]!r}: {error}") from error
