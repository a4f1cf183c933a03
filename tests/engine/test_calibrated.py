"""Calibrating an emulated device, by its own clock, gives back its model."""

from functools import partial
from pathlib import Path

import pytest

from benchmarks.engine.bench_engine import BenchEngine
from benchmarks.engine_process import EngineProcess
from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import Clock, EngineModel
from engine_ext.costs.hardware import Machine, hardware
from engine_ext.costs.model_shape import preset
from engine_ext.plugin.options import Emulation
from service.workloads.fitting import fit

COST = CostModel(preset("llama-3-8b"), Machine(hardware("h100")))
CONTEXT = 8192


async def measure(engine: BenchEngine, steps: Path) -> None:
    async for _ in engine.measure_steps(steps):
        pass


@pytest.mark.slow
def test_the_load_of_a_calibration_shows_every_cost(demo: Path, log: Path, tmp_path: Path) -> None:
    """The device takes exactly as long as its model says, so that other work on this machine changes no figure."""
    steps = tmp_path / "steps.jsonl"
    make = partial(BenchEngine.emulated, str(demo), COST, 40_000, CONTEXT, Emulation.VIRTUAL, str(steps))
    with EngineProcess(make, log) as engine:
        engine.do(measure, steps)
    truth, found = EngineModel.of(COST, Clock.MIXED), fit(steps, "mixed", 0.1)
    print(found, truth)
    assert found.gemm_s == pytest.approx(truth.gemm_s, rel=0.01)
    assert found.read_s == pytest.approx(truth.read_s, rel=0.01)
    assert found.quadratic_s == pytest.approx(truth.quadratic_s, rel=0.01)
    assert found.weights_s + found.overhead_s == pytest.approx(truth.weights_s, rel=0.01)
    assert found.errors["mixed"].steps > 5
