"""The books of steps: what they add up to, the series, and the file."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("sglang")

from engine_ext.coserve.predictor import Load
from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import Clock, EngineModel
from engine_ext.costs.hardware import Machine, hardware
from engine_ext.costs.model_shape import preset
from engine_ext.plugin.scheduler import steps
from engine_ext.plugin.scheduler.steps import INTERVALS, Lane, StepBooks

COST = CostModel(preset("llama-3-8b"), Machine(hardware("h200")))
MODEL = EngineModel.of_steps(COST, Clock.MIXED).numbers


def test_a_step_that_was_launched_while_another_ran_takes_from_the_end_of_that() -> None:
    books = StepBooks(MODEL)
    books.begin(Load(100, 1e4, 1, 0, 0), 10.0)
    books.begin(Load(0, 0.0, 0, 4, 4000), 10.1)
    books.end(10.5)
    books.end(10.7)
    books.begin(Load(0, 0.0, 0, 4, 4004), 12.0)  # after a rest
    books.end(12.25)
    found = books.report()
    assert found["engine_steps"] == 3
    assert found["step_s"] == pytest.approx(0.5 + 0.2 + 0.25)
    assert found["prompt_tokens"] == 100
    assert found["output_tokens"] == 8
    assert found["reads_s"] == pytest.approx(8004 * COST.read_s_per_token)
    assert found["predicted_step_s"] == pytest.approx(found["compute_s"] + found["reads_s"])


def test_a_prefill_beside_decodes_takes_no_time_twice(tmp_path: Path) -> None:
    books = StepBooks(MODEL, tmp_path / "steps.jsonl")
    books.begin(Load(1000, 1e6, 1, 0, 0), 10.0, Lane.PREFILLS)
    for step in range(3):
        books.begin(Load(0, 0.0, 0, 4, 4000), 10.0 + step)
        books.end(10.5 + step)
    assert (books.steps, books.report()["prompt_tokens"]) == (3, 0)
    books.end(13.0, Lane.PREFILLS)
    found = books.report()
    assert found["prompt_tokens"] == 1000
    assert found["step_s"] == pytest.approx(3.0)
    assert not (tmp_path / "steps.jsonl").exists()  # what ran beside another tells no costs


def test_a_step_ends_before_its_results_are_handled(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang handles them for milliseconds, in which the next step runs: reads seemed to cost nothing."""
    books, clock = StepBooks(MODEL), iter([10.0, 10.5])
    monkeypatch.setattr(steps, "now", lambda: next(clock))
    monkeypatch.setattr(steps.emulated, "outlasts_launch", lambda: True)
    monkeypatch.setattr(steps.pulse_hooks, "stepped", lambda _: None)
    books.begin(Load(100, 1e4, 1, 0, 0), steps.now())
    scheduler = SimpleNamespace(batchweave_steps=books)
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_split_prefill=lambda: False))
    waited = list[str]()
    monkeypatch.setattr(steps.emulated, "wait_for", lambda _: waited.append("waited"))

    def handle(*_: object) -> str:
        assert waited == ["waited"]
        assert books.report()["step_s"] == pytest.approx(0.5)
        return "handled"

    assert steps.process_batch_result(handle, scheduler, batch, None) == "handled"
    assert books.report()["engine_steps"] == 1


def test_an_end_without_a_beginning_is_nobody_s_step() -> None:
    books = StepBooks(MODEL)
    books.end(1.0)
    assert books.report()["engine_steps"] == 0


def test_the_series_stays_small_and_loses_nothing() -> None:
    books, count = StepBooks(MODEL), 5 * INTERVALS + 3
    for step in range(count):
        books.begin(Load(10, 100.0, 1, 1, 50), float(step))
        books.end(step + 0.5)
    found = books.report()
    assert len(found["series"]) <= INTERVALS + 1
    assert np.array(found["series"])[:, 4].sum() == found["prompt_tokens"] == 10 * count
    assert found["step_s"] == pytest.approx(0.5 * count)


def test_the_file_is_a_profile(tmp_path: Path) -> None:
    from service.workloads.profile import read_profile

    file = tmp_path / "steps.jsonl"
    books = StepBooks(MODEL, file)
    for step in range(40):
        books.begin(Load(10 * (step % 3), 100.0 * (step % 3), 1, 1, 50), float(step))
        books.end(step + 0.5)
    assert len(file.read_text().splitlines()) == 32
    books.flush()
    assert json.loads(file.read_text().splitlines()[1])["prefill_tokens"] == 10
    assert len(read_profile(file)["seconds"]) == 40


def test_a_file_that_cannot_be_written_stops_nobody(tmp_path: Path) -> None:
    books = StepBooks(MODEL, tmp_path / "nowhere" / "steps.jsonl")
    for step in range(40):
        books.begin(Load(10, 100.0, 1, 1, 50), float(step))
        books.end(step + 0.5)
    assert books.file is None
    assert books.report()["engine_steps"] == 40


def test_a_new_engine_begins_a_new_file(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    for _ in range(2):
        books = StepBooks(MODEL, file)
        for step in range(40):
            books.begin(Load(10, 100.0, 1, 1, 50), float(step))
            books.end(step + 0.5)
        books.begin(Load(0, 0.0, 0, 0, 0), 100.0)  # an idle rank's
        books.end(100.1)
        books.flush()
    assert len(file.read_text().splitlines()) == 40
