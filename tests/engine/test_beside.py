"""Batches have the engine to themselves until online requests come or are expected."""

import numpy as np
import pytest

pytest.importorskip("sglang")

from engine_ext.coserve.limit import NO_LIMITS, Limits
from engine_ext.coserve.predictor import Load
from engine_ext.coserve.slo import SloClass
from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import Clock, EngineModel
from engine_ext.costs.hardware import Machine, hardware
from engine_ext.costs.model_shape import preset
from engine_ext.plugin.scheduler.beside import FORGET_S, Beside, Decodes
from engine_ext.plugin.scheduler.online import NOBODY

MODEL = EngineModel.of_steps(CostModel(preset("llama-3-8b"), Machine(hardware("h200"))), Clock.MIXED).numbers
SLO = SloClass(ttft_s=1.0, tpot_s=0.05)


def test_an_engine_with_profiled_limits_expects_online_requests_for_an_hour() -> None:
    beside = Beside.of(SLO, Limits(prompt_tokens=256), MODEL, 1000, 0)
    assert beside.is_needed
    for now, is_needed in ((5.0, True), (FORGET_S, True), (FORGET_S + 6.0, False)):
        beside.pass_time(NOBODY, now)
        assert beside.is_needed == is_needed


def test_any_other_engine_waits_for_the_first_one() -> None:
    beside, req = Beside.of(SLO, NO_LIMITS, MODEL, 1000, 0), object()
    assert not beside.is_needed
    beside.arrived(req, 7.0)
    for now, is_needed in ((7.1, True), (FORGET_S, True), (FORGET_S + 7.0, False)):
        beside.pass_time(NOBODY, now)
        assert beside.is_needed == is_needed


def test_the_hour_begins_when_the_clock_has_told_a_time() -> None:
    """Several ranks have no time before they agree on one, nor while online requests run alone."""
    beside = Beside.of(SLO, Limits(prompt_tokens=256), MODEL, 1000, 0)
    for now in (0.0, 20_000.0, 20_001.0):
        beside.pass_time(NOBODY, now)
        assert beside.is_needed
    beside.arrived(object(), 20_001.0)
    beside.forget()
    beside.pass_time(NOBODY, 30_000.0)
    beside.pass_time(NOBODY, 30_000.1)
    assert beside.is_needed


def test_steps_with_online_prompts_do_nothing_for_batches_where_the_profile_says_so() -> None:
    decodes = Decodes(Load(0, 0.0, 0, 0, 0), np.full(3, 100), np.zeros(3, dtype=np.int64))
    for alone in (False, True):
        beside = Beside.of(SLO, Limits(prompts_alone=alone), MODEL, 1000, 0)
        req = object()
        beside.arrived(req, 1.0)
        arrived = NOBODY._replace(prompts=[req], waiting=1, tokens=500)
        beside.pass_time(arrived, 1.0)
        allowed = beside.allow(arrived, decodes, 0, 2048, 1.0)
        assert allowed.online == 500
        assert (allowed.most, int(allowed.rests.sum())) == ((500, 3) if alone else (2048, 0))
        beside.pass_time(NOBODY, 1.1)
        allowed = beside.allow(NOBODY, decodes, 0, 2048, 1.1)
        assert (allowed.most, int(allowed.rests.sum())) == (2048, 0)


def test_batches_go_on_while_an_online_prompt_waits_for_their_room() -> None:
    """The prompt finds no room in the KV cache until decodes end that the step's limit leaves out."""
    decodes = Decodes(Load(0, 0.0, 0, 0, 0), np.full(3, 100), np.zeros(3, dtype=np.int64))
    beside, req = Beside.of(SLO, Limits(prompts_alone=True), MODEL, 1000, 0), object()
    beside.arrived(req, 1.0)
    waits = NOBODY._replace(prompts=[req], waiting=1, tokens=500)
    left_out = list[int]()
    for now in (1.0, 1.1, 1.2, 1.3):
        beside.pass_time(waits, now)
        rests = int(beside.allow(waits, decodes, 0, 2048, now).rests.sum())
        beside.launched(Load(0, 0.0, 0, 3 - rests, 300 - 100 * rests))
        left_out.append(rests)
    assert left_out[0] == 3
    assert max(left_out[1:]) < 3
    beside.launched(Load(500, 250_000.0, 1, 0, 0))
    beside.pass_time(waits, 1.4)
    assert int(beside.allow(waits, decodes, 0, 2048, 1.4).rests.sum()) == 3
