"""A model is planned for the machine that its workers run on."""

import json
from pathlib import Path
from typing import Any

import pytest

from service.db.models import register_model
from service.db.sessions import Database
from service.estimates.model_costs import assumed_gpu, told_machine
from service.jobs.costs import Costs
from service.settings import Settings

CALIBRATED = {"name": "mine", "flops": {"bf16": 1e14}, "bandwidth": 1e12, "memory_bytes": 8e10, "overhead_s": 1e-4}


def of_worker(settings: Settings, gpu: str, name: str = "m", tp: int = 1) -> Settings:
    changes = {"gpu": gpu, "model": "llama-3-8b", "model_name": name, "engine_args": {"tp_size": tp}}
    return Settings.model_validate({**settings.model_dump(), **changes})


async def test_each_model_has_the_costs_of_its_own_machine(
    database: Database, settings: Settings, tmp_path: Path
) -> None:
    calibration = tmp_path / "mine.json"
    calibration.write_text(json.dumps({**CALIBRATED, "calibration": {"model": "x"}}))
    costs = Costs(database, settings)
    for name, gpu, tp in (("one", "a100-80gb", 1), ("two", "h100", 4), ("three", str(calibration), 1)):
        mine = of_worker(settings, gpu, name, tp)
        await register_model(database, mine, 8192, ["/v1/completions"], told_machine(mine))
    calibration.unlink()  # the planner is on another machine
    found = [(await costs.of(name)).machine for name in ("one", "two", "three")]
    assert [(each.hardware.name, each.tp) for each in found] == [("a100-80gb", 1), ("h100", 4), ("mine", 1)]
    assert found[2].hardware.overhead_s == 1e-4


async def test_a_worker_on_another_machine_changes_the_costs(database: Database, settings: Settings) -> None:
    costs = Costs(database, settings)
    await register_model(database, of_worker(settings, "h100"), 8192)  # the planner's
    assert (await costs.of("m")).machine.hardware.name == assumed_gpu(settings)
    for gpu in ("a100-80gb", "h100"):
        mine = of_worker(settings, gpu)
        await register_model(database, mine, 8192, ["/v1/completions"], told_machine(mine))
        assert (await costs.of("m")).machine.hardware.name == gpu
        await register_model(database, of_worker(settings, "h200"), 8192)  # the planner starts again
        assert (await costs.of("m")).machine.hardware.name == gpu


@pytest.mark.parametrize(
    "told", [{"gpu": "x100", "tp": 1}, {"gpu": {"name": "x"}, "tp": 1}, {"gpu": "h100"}, {"tp": 1}]
)
async def test_what_cannot_be_read_is_planned_for_the_machine_of_the_settings(
    database: Database, settings: Settings, told: dict[str, Any]
) -> None:
    await register_model(database, of_worker(settings, "h100"), 8192, ["/v1/completions"], told)
    assert (await Costs(database, settings).of("m")).machine.hardware.name == assumed_gpu(settings)
