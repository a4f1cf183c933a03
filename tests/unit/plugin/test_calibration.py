"""From an engine's steps to the hardware that the planner plans for."""

import asyncio
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from batchweave.table import command_line
from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import Clock, EngineModel, compute_time, step_time
from engine_ext.costs.hardware import Machine, hardware
from engine_ext.costs.model_shape import preset
from engine_ext.errors import EngineStartError
from engine_ext.plugin.worker.calibration_load import DECODES, Limits, blend, run_load
from service.errors import CalibrationError, CostsError, WorkloadError
from service.estimates.model_costs import measured_overlap, planning_costs
from service.settings import load_settings
from service.worker.calibration import calibrated, compare

SHAPE = preset("llama-3-8b")


def steps_of(path: Path, gpu: str, flat: bool = False) -> None:
    """Steps of a machine by its datasheet, with 1% noise."""
    cost = CostModel(SHAPE, Machine(hardware(gpu)))
    model, generator = EngineModel.of_steps(cost, Clock.MIXED).numbers, np.random.default_rng(0)
    with path.open("w") as file:
        for step in range(200):
            prompt = 0 if step % 2 else int(2 ** generator.uniform(6, 13))
            decoding = int(generator.integers(1, 200)) if step % 4 else 0
            kv = decoding * int(generator.integers(100, 8000))
            compute = float(compute_time(model, prompt + decoding, float(prompt) ** 2))
            seconds = float(step_time(model, compute, kv * cost.read_s_per_token)) + 2e-4
            seconds = 1e-3 if flat else seconds * float(generator.normal(1, 0.01))
            row = {"prefill_tokens": prompt, "decoding": decoding, "kv_tokens": kv, "seconds": seconds}
            file.write(json.dumps({**row, "quadratic": float(prompt) ** 2}) + "\n")


def test_what_was_measured_is_what_is_planned_for(tmp_path: Path) -> None:
    steps, output = tmp_path / "steps.jsonl", tmp_path / "machine.json"
    steps_of(steps, "a100-80gb")
    found = calibrated(load_settings(model="llama-3-8b", gpu="h200"), steps, output, "Some GPU", 40 << 30)
    assert found.errors["steps"].mean < 0.03
    true = CostModel(SHAPE, Machine(hardware("a100-80gb")))
    planned = planning_costs("llama-3-8b", str(output), 1)
    assert planned.gemm_s_per_token == pytest.approx(true.gemm_s_per_token, rel=0.05)
    assert planned.read_s_per_token == pytest.approx(true.read_s_per_token, rel=0.05)
    assert planned.weights_s == pytest.approx(true.weights_s, rel=0.2)
    assert planned.quadratic_s == pytest.approx(true.quadratic_s, rel=0.2)
    written = json.loads(output.read_text())
    assert written["name"] == "h200, calibrated on Some GPU"
    assert written["memory_bytes"] == 40 << 30  # not the preset's
    assert written["calibration"]["model"] == "llama-3-8b"
    assert set(written["calibration"]["errors"]) == {"prefill", "decode", "mixed", "steps"}


def test_steps_that_tell_nothing_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    steps, output = tmp_path / "steps.jsonl", tmp_path / "machine.json"
    settings = load_settings(model="llama-3-8b")
    steps.write_text('{"prefill_tokens": 10, "decoding": 0, "kv_tokens": 0, "seconds": 0.1}\n')
    with pytest.raises(WorkloadError, match="at least 12"):
        calibrated(settings, steps, output, "x")
    steps_of(steps, "a100-80gb", flat=True)
    with pytest.raises((WorkloadError, CalibrationError)):
        calibrated(settings, steps, output, "x")
    assert not output.exists()


@pytest.mark.parametrize(
    "limits", [Limits(8192, 20_000, 32, 1000), Limits(300, 400, 1, 50), Limits(32_768, 10**6, 600, 9)]
)
def test_the_load_keeps_to_what_the_engine_can_hold(limits: Limits) -> None:
    running: list[int] = []
    sizes, most = set[int](), 0

    async def run(ids: list[int], tokens: int) -> None:
        nonlocal most
        assert max(ids) < limits.vocabulary
        assert len(ids) + tokens <= limits.context
        sizes.add(len(ids))
        running.append(len(ids) + tokens)
        most = max(most, len(running))
        assert sum(running) <= limits.capacity
        await asyncio.sleep(0)
        running.remove(len(ids) + tokens)

    async def main() -> list[str]:
        return [part async for part in run_load(run, limits)]

    parts = asyncio.run(main())
    assert "not counted" in parts[0]
    assert most <= limits.running
    assert max(sizes) > (min(limits.context, limits.capacity) - 2 * DECODES) // 2


def test_an_engine_that_fails_is_left_out_of_the_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = {"none": '{"seconds": 4.0}', "mixed": '{"seconds": 2.5}', "pdmux": '{"seconds": null}'}
    passed: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Any:
        passed.append(command)
        if command[3] == "mixed":
            raise subprocess.CalledProcessError(-9, command)
        return SimpleNamespace(stdout=f"a line of its own\n{trials[command[3]]}\n")

    monkeypatch.setattr(subprocess, "run", run)
    file, said = tmp_path / "machine.json", list[str]()
    file.write_text('{"name": "x"}')
    assert compare(load_settings(), file, list(trials), said.append) == {"none": 4.0}
    assert json.loads(file.read_text()) == {"name": "x", "overlap": {"fastest": "none", "seconds": {"none": 4.0}}}
    assert passed[2][-2:] == ["--limit-s", "12.0"]
    assert any("mixed: its engine failed" in line for line in said)
    assert any("pdmux: more than 3 times" in line for line in said)


def test_the_blend_computes_as_long_as_it_reads_and_fits() -> None:
    cost = CostModel(preset("llama-3-8b"), Machine(hardware("h200")))
    limits = Limits(context=8192, capacity=400_000, running=256, vocabulary=1000)
    requests = blend(cost, limits, 10.0)
    compute = sum(
        prompt * cost.gemm_s_per_token + prompt**2 * cost.quadratic_s for prompt, few in requests if few < 100
    )
    reads = sum((prompt * many + many**2 / 2) * cost.read_s_per_token for prompt, many in requests if many > 100)
    assert compute == pytest.approx(10.0, rel=0.01)
    assert reads == pytest.approx(10.0, rel=0.01)
    first = requests[: len(requests) // 10]
    assert {many > 100 for _, many in first} == {True, False}  # each kind by turns
    small = Limits(context=300, capacity=400, running=1, vocabulary=50)
    assert all(prompt + output <= 200 for prompt, output in blend(cost, small, 0.01))


def test_workers_use_what_a_calibration_found_fastest(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    assert measured_overlap("h200") is None
    file.write_text("{}")
    assert measured_overlap(str(file)) is None
    file.write_text(json.dumps({"overlap": {"fastest": "mixed", "seconds": {"none": 2.0, "mixed": 1.0}}}))
    assert measured_overlap(str(file)) == "mixed"
    file.write_text(json.dumps({"overlap": {"fastest": "warp"}}))
    with pytest.raises(CostsError, match=r"overlap\.fastest"):
        measured_overlap(str(file))


def test_the_command_prints_what_it_wrote(tmp_path: Path) -> None:
    steps, output = tmp_path / "steps.jsonl", tmp_path / "machine.json"
    steps_of(steps, "a100-80gb")
    arguments = ["calibrate", "--model", "llama-3-8b", "--steps", str(steps), "--output", str(output), "--json"]
    found = CliRunner().invoke(command_line("calibrate"), arguments)
    assert found.exit_code == 0
    assert json.loads(found.stdout) == json.loads(output.read_text())


def test_what_the_engine_refuses_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise EngineStartError("Model architectures ['X'] are not supported for now.")

    monkeypatch.setattr("service.worker.engine.make_engine", refuse)
    arguments = ["calibrate", "--model", "llama-3-8b", "--output", str(tmp_path / "machine.json")]
    found = CliRunner().invoke(command_line("calibrate"), arguments)
    assert (found.exit_code, found.stderr.splitlines()[-1]) == (
        1,
        "error: Model architectures ['X'] are not supported for now.",
    )
