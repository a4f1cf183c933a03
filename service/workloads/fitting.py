"""Fits the cost model to a profile, for `batchweave calibrate` and `batchweave simulate --profile`.

It imports no simulator, because `calibrate` runs on a worker's machine, which needs none.
"""

from dataclasses import replace
from pathlib import Path

from engine_ext.costs.calibrate import Calibration, Profile, calibrate
from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import INTERFERENCE, Clock
from engine_ext.costs.hardware import DTYPE_BYTES
from service.errors import WorkloadError
from service.workloads.profile import read_profile

CLOCKS = {clock.name.lower(): clock for clock in Clock}
ASSUMED_INTERFERENCE = INTERFERENCE
FASTEST = 1e20  # per second: caps a rate whose measured cost is too close to zero to distinguish


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
