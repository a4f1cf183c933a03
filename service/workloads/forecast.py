"""`batchweave simulate`: compares policies on a simulated engine, before any GPU is rented."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from engine_ext.costs.calibrate import Calibration, Profile, calibrate
from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import INTERFERENCE, Clock, EngineModel
from engine_ext.costs.hardware import DTYPE_BYTES
from engine_ext.errors import TooLarge
from engine_ext.plan.lengths import UNKNOWN
from engine_ext.plan.prompts import Prompts
from engine_ext.simulate.policies import POLICIES, Outcome, prepare, simulate
from service.errors import WorkloadError
from service.workloads.profile import read_profile
from service.workloads.workload import Workload

CLOCKS = {clock.name.lower(): clock for clock in Clock}
ALL_POLICIES = ",".join(POLICIES)
ASSUMED_INTERFERENCE = INTERFERENCE
FASTEST = 1e20  # per second: caps a rate whose measured cost is too close to zero to distinguish
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


def check_options(names: Sequence[str], *clocks: str) -> None:
    """Check the names of policies and clocks. Raises WorkloadError for an unknown one."""
    if not names:
        raise WorkloadError(f"no policies are named; choose from {', '.join(POLICIES)}")
    for clock in clocks:
        if clock not in CLOCKS:
            raise WorkloadError(f"no clock {clock!r}; choose from {', '.join(CLOCKS)}")
    for name in names:
        if name not in POLICIES:
            raise WorkloadError(f"no policy {name!r}; choose from {', '.join(POLICIES)}")


def fit(path: Path, clock: str, interference: float) -> Calibration:
    """Fit the engine model to a profile that was measured on an engine of this clock.

    Keeps the given interference where the profile does not show it. Raises WorkloadError.
    """
    try:
        return calibrate(Profile(**read_profile(path)), CLOCKS[clock], interference)
    except ValueError as error:
        raise WorkloadError(f"{path}: {error}") from error


def as_measured(cost: CostModel, calibration: Calibration) -> CostModel:
    """Return the cost model on hardware whose peaks are those that the profiled engine reached."""
    machine = cost.machine
    flops = 2 * cost.shape.active_parameters / calibration.gemm_s / machine.accelerators
    bandwidth = machine.hardware.bandwidth
    if calibration.read_s > 0:
        bandwidth = cost.read_bytes_per_token / calibration.read_s / machine.accelerators
    weight_bandwidth, attention_flops = None, None
    if calibration.weights_s > 0:
        weights = cost.shape.weight_bytes(DTYPE_BYTES[cost.dtype])
        weight_bandwidth = min(weights / calibration.weights_s / machine.accelerators, FASTEST)
    if calibration.quadratic_s > 0:
        attention_flops = min(cost.shape.attention_flops / calibration.quadratic_s / machine.accelerators, FASTEST)
    measured = replace(
        machine.hardware,
        name=f"{machine.hardware.name}, measured",
        flops={**machine.hardware.flops, cost.dtype: flops},
        bandwidth=bandwidth,
        weight_bandwidth=weight_bandwidth,
        attention_flops=attention_flops,
        link_bandwidth=None,  # what ranks send each other is in the measured `flops`
        overhead_s=calibration.overhead_s or None,
    )
    return replace(cost, machine=replace(machine, hardware=measured))


def forecast(
    workload: Workload,
    cost: CostModel,
    policies: Sequence[str],
    clock: str,
    interference: float,
    sample: float,
    seed: int,
    calibration: Calibration | None = None,
) -> Iterator[Outcome]:
    """Run the policies one after another. Raises WorkloadError if a true output length is missing.

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
    for name in policies:
        try:
            yield simulate(work, model, name, seed)
        except TooLarge as error:
            raise WorkloadError(f"{workload.ids[error.number]!r}: {error}") from error
