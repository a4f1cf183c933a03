"""Batches have the engine to themselves until online requests come or are expected."""

import pytest

pytest.importorskip("sglang")

from engine_ext.coserve.limit import NO_LIMITS, Limits
from engine_ext.coserve.slo import SloClass
from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import Clock, EngineModel
from engine_ext.costs.hardware import Machine, hardware
from engine_ext.costs.model_shape import preset
from engine_ext.plugin.scheduler.beside import FORGET_S, Beside
from engine_ext.plugin.scheduler.online import NOBODY

MODEL = EngineModel.of_steps(CostModel(preset("llama-3-8b"), Machine(hardware("h200"))), Clock.MIXED).numbers
BOUNDS = SloClass(ttft_s=1.0, tpot_s=0.05).bounds


def test_an_engine_with_profiled_limits_expects_online_requests_for_an_hour() -> None:
    beside = Beside.of(BOUNDS, Limits(prompt_tokens=256), MODEL, 1000, 0)
    assert beside.is_needed
    for now, is_needed in ((5.0, True), (FORGET_S, True), (FORGET_S + 6.0, False)):
        beside.pass_time(NOBODY, now)
        assert beside.is_needed == is_needed


def test_any_other_engine_waits_for_the_first_one() -> None:
    beside, req = Beside.of(BOUNDS, NO_LIMITS, MODEL, 1000, 0), object()
    assert not beside.is_needed
    beside.arrived(req, 7.0)
    for now, is_needed in ((7.1, True), (FORGET_S, True), (FORGET_S + 7.0, False)):
        beside.pass_time(NOBODY, now)
        assert beside.is_needed == is_needed


def test_the_hour_begins_when_the_clock_has_told_a_time() -> None:
    """Several ranks have no time before they agree on one, nor while online requests run alone."""
    beside = Beside.of(BOUNDS, Limits(prompt_tokens=256), MODEL, 1000, 0)
    for now in (0.0, 20_000.0, 20_001.0):
        beside.pass_time(NOBODY, now)
        assert beside.is_needed
    beside.arrived(object(), 20_001.0)
    beside.forget()
    beside.pass_time(NOBODY, 30_000.0)
    beside.pass_time(NOBODY, 30_000.1)
    assert beside.is_needed
