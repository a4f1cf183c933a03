"""Batches have the engine to themselves until online requests come or are expected."""

from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("sglang")

from engine_ext.coserve.limit import NO_LIMITS, Limits
from engine_ext.coserve.predictor import Load
from engine_ext.coserve.slo import CLASSES, DEFAULT, FLEX, PRIORITY, SloClass
from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import Clock, EngineModel
from engine_ext.costs.hardware import Machine, hardware
from engine_ext.costs.model_shape import preset
from engine_ext.plugin.marks import KIND, online_marks
from engine_ext.plugin.scheduler.beside import FORGET_S, Beside
from engine_ext.plugin.scheduler.online import NOBODY
from engine_ext.plugin.scheduler.turns import Turns
from tests.engine.dividing import divide

MODEL = EngineModel.of_steps(CostModel(preset("llama-3-8b"), Machine(hardware("h200"))), Clock.MIXED).numbers
SLO = SloClass(ttft_s=1.0, tpot_s=0.05)
NOTHING = Load(0, 0.0, 0, 0, 0)


class Req:
    def __init__(self, slo: str = DEFAULT) -> None:
        self.origin_input_ids, self.output_ids, self.finished_reason = [1] * 500, list[int](), None
        self.sampling_params = SimpleNamespace(custom_params=online_marks(slo) or None, max_new_tokens=10)


def test_an_engine_with_profiled_limits_expects_online_requests_for_an_hour() -> None:
    beside = Beside.of((SLO,), Limits(prompt_tokens=256), MODEL, 1000, 0)
    assert beside.is_needed
    for now, is_needed in ((5.0, True), (FORGET_S, True), (FORGET_S + 6.0, False)):
        beside.pass_time(NOBODY, now)
        assert beside.is_needed == is_needed


def test_any_other_engine_waits_for_the_first_one() -> None:
    beside, req = Beside.of((SLO,), NO_LIMITS, MODEL, 1000, 0), Req()
    assert not beside.is_needed
    beside.arrived(req, 7.0)
    for now, is_needed in ((7.1, True), (FORGET_S, True), (FORGET_S + 7.0, False)):
        beside.pass_time(NOBODY, now)
        assert beside.is_needed == is_needed


def test_the_hour_begins_when_the_clock_has_told_a_time() -> None:
    """Several ranks have no time before they agree on one, nor while online requests run alone."""
    beside = Beside.of((SLO,), Limits(prompt_tokens=256), MODEL, 1000, 0)
    for now in (0.0, 20_000.0, 20_001.0):
        beside.pass_time(NOBODY, now)
        assert beside.is_needed
    beside.arrived(Req(), 20_001.0)
    beside.forget()
    beside.pass_time(NOBODY, 30_000.0)
    beside.pass_time(NOBODY, 30_000.1)
    assert beside.is_needed


def test_steps_with_online_prompts_do_nothing_for_batches_where_the_profile_says_so() -> None:
    decodes = np.full(3, 100)
    for alone in (False, True):
        beside = Beside.of((SLO,), Limits(prompts_alone=alone), MODEL, 1000, 0)
        req = Req()
        beside.arrived(req, 1.0)
        arrived = NOBODY._replace(prompts=[req], waiting=1, tokens=500)
        beside.pass_time(arrived, 1.0)
        allowed, rests = divide(beside, arrived, 1.0, decodes)
        assert allowed.online == 500
        assert (allowed.most, int(rests.sum())) == ((500, 3) if alone else (2048, 0))
        beside.pass_time(NOBODY, 1.1)
        allowed, rests = divide(beside, NOBODY, 1.1, decodes)
        assert (allowed.most, int(rests.sum())) == (2048, 0)


def test_batches_go_on_while_an_online_prompt_waits_for_their_room() -> None:
    """The prompt finds no room in the KV cache until decodes end that the step's limit leaves out."""
    decodes = np.full(3, 100)
    beside, req = Beside.of((SLO,), Limits(prompts_alone=True), MODEL, 1000, 0), Req()
    beside.arrived(req, 1.0)
    waits = NOBODY._replace(prompts=[req], waiting=1, tokens=500)
    left_out = list[int]()
    for now in (1.0, 1.1, 1.2, 1.3):
        beside.pass_time(waits, now)
        rests = int(divide(beside, waits, now, decodes)[1].sum())
        beside.launched(Load(0, 0.0, 0, 3 - rests, 300 - 100 * rests), NOTHING)
        left_out.append(rests)
    assert left_out[0] == 3
    assert max(left_out[1:]) < 3
    beside.launched(*2 * [Load(500, 250_000.0, 1, 0, 0)])
    beside.pass_time(waits, 1.4)
    assert int(divide(beside, waits, 1.4, decodes)[1].sum()) == 3


def test_batches_that_make_requests_late_lose_half_of_their_share() -> None:
    beside = Beside.of((SLO,), NO_LIMITS, MODEL, 100_000, 0)
    for at in (10.0, 20.0, 30.0):
        req = Req()
        beside.arrived(req, at)
        waits = NOBODY._replace(prompts=[req], waiting=1, tokens=500)
        beside.pass_time(waits, at)
        divide(beside, waits, at)
        beside.launched(Load(2048, 2048.0**2, 4, 0, 0), Load(500, 500.0**2, 1, 0, 0))
        req.output_ids.append(1)
        beside.pass_time(NOBODY._replace(decoding=[req]), at + 2.0)
        beside.pass_time(NOBODY, at + 2.01)
    assert beside.late == 3
    assert 4.0 < beside.excess_s < 6.0  # about three quarters of 3 x 2 s
    assert beside.memory.governor.share[0] == 0.5


def test_who_came_while_nobody_told_the_time_is_not_kept() -> None:
    """Several ranks agree on no time while online requests run alone, however many come and go."""
    beside = Beside.of((SLO,), NO_LIMITS, MODEL, 1000, 0)
    for _ in range(100):
        beside.arrived(Req(), 7.0)
        beside.forget()
    assert sum(len(each) for each in vars(beside).values() if isinstance(each, (dict, list, deque))) == 0


def test_batches_do_as_much_beside_requests_that_may_wait_as_beside_none() -> None:
    """Beside one that must not wait, the limit leaves decodes of batches out; beside flex it does not."""
    decodes = np.full(200, 5000)
    rests = dict[str, int]()
    for slo in (DEFAULT, FLEX):
        beside, req = Beside.of(CLASSES, Limits(limit_s=0.006), MODEL, 1_000_000, 0), Req(slo)
        req.output_ids.append(1)
        beside.arrived(req, 1.0)
        decoding = NOBODY._replace(decoding=[req])
        beside.pass_time(decoding, 1.0)
        rests[slo] = int(divide(beside, decoding, 1.0, decodes)[1].sum())
    assert rests[DEFAULT] > 0
    assert rests[FLEX] == 0


def test_each_class_has_its_own_deadlines() -> None:
    strict = SloClass(PRIORITY, ttft_s=0.2, tpot_s=0.01)
    beside = Beside.of((strict, *CLASSES[1:]), NO_LIMITS, MODEL, 1000, 0)
    slack_s = dict[str, float]()
    for slo in (PRIORITY, DEFAULT, FLEX):
        req = Req(slo)
        beside.arrived(req, 1.0)
        waits = NOBODY._replace(decoding=[req])
        beside.pass_time(waits, 1.0)
        divide(beside, waits, 1.0)
        slack_s[slo] = beside.slack_s
    assert slack_s == pytest.approx({PRIORITY: 0.2, DEFAULT: 1.0, FLEX: np.inf})


def test_stronger_classes_go_first_and_who_comes_first_is_first() -> None:
    queue, turns = list[Req](), Turns()
    for number, slo in enumerate((FLEX, DEFAULT, PRIORITY, DEFAULT, FLEX, PRIORITY)):
        queue.append(Req(slo))
        queue[-1].origin_input_ids = [number]
        turns.came(queue)
    assert [req.origin_input_ids[0] for req in queue] == [2, 5, 1, 3, 0, 4]
    ours = Req()
    ours.sampling_params.custom_params = {KIND: "a batch"}
    queue.append(ours)
    queue.append(Req(PRIORITY))
    turns.came(queue)
    assert queue[-2] is ours
