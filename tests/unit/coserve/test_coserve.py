"""What online requests leave to a batch in a step: deadlines, predictions, limits, reserves and who is left out."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_ext.coserve.harvest import harvest, riding_tokens
from engine_ext.coserve.limit import NOT_PROFILED, Profiled, step_limit
from engine_ext.coserve.predictor import (
    Load,
    Predictor,
    longest_chunk,
    new_predictor,
    observe,
    predict,
    with_chunk,
    with_decodes,
    with_margin,
)
from engine_ext.coserve.reserve import new_online_kv, note_online_kv, reserve
from engine_ext.coserve.slo import SloClass, deadline, least_slack
from engine_ext.coserve.tuning import GUARD, MOST_SKIPPED
from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import Clock, EngineModel
from engine_ext.costs.hardware import Machine, hardware
from engine_ext.costs.model_shape import preset
from engine_ext.errors import InputError
from tests.unit.coserve.operators import Achievable, ForwardPass, OperatorModel, Prefill

COST = CostModel(preset("llama-3-8b"), Machine(hardware("h200")))
NUMBERS = EngineModel.of(COST, Clock.MIXED).numbers
NOTHING = Load(0, 0.0, 0, 0, 0)


def test_a_token_is_due_by_the_pace_since_the_first_one() -> None:
    bounds = SloClass(ttft_s=2.0, tpot_s=0.05).bounds
    assert deadline(bounds, 10.0, 0.0, 0.0, 0) == 12.0
    assert deadline(bounds, 10.0, 10.5, 10.5, 1) == pytest.approx(10.55)
    assert deadline(bounds, 10.0, 10.5, 10.6, 20) == pytest.approx(11.5)  # those before came early
    assert deadline(SloClass(tpot_s=0.05, tbt_s=0.1).bounds, 10.0, 10.5, 10.6, 20) == pytest.approx(10.7)
    assert deadline(SloClass().bounds, 10.0, 10.5, 10.6, 20) == math.inf


def test_the_least_slack_is_that_of_the_latest() -> None:
    bounds = SloClass(ttft_s=1.0, tpot_s=0.1).bounds
    times = np.array([0.0, 5.0])
    assert least_slack(bounds, 5.5, times, times, times, np.array([60, 0])) == pytest.approx(0.5)
    assert least_slack(bounds, 5.5, times, times, times, np.array([50, 0])) == pytest.approx(-0.5)
    assert least_slack(bounds, 5.5, times[:0], times[:0], times[:0], np.zeros(0, dtype=np.int64)) == math.inf


@pytest.mark.parametrize("wrong", [{"ttft_s": 0.0}, {"tpot_s": -1.0}, {"tbt_s": math.inf}, {"percentile": 1.0}])
def test_an_slo_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        SloClass(**wrong)  # pyright: ignore[reportArgumentType]


def passes(count: int, seed: int) -> list[tuple[Load, float]]:
    """Steps of the operator model on a machine that reaches less than its datasheet says, with noise of 1%."""
    generator = np.random.default_rng(seed)
    shape = preset("llama-3-8b")
    reached = Achievable(0.7 * 989e12, 0.5 * 989e12, 989e12, 0.85 * 4.8e12, 0.8 * 4.8e12, 0.0004, 0.0002)
    operators = OperatorModel(shape, reached)
    found: list[tuple[Load, float]] = []
    for _ in range(count):
        decodes = generator.integers(50, 4000, int(generator.integers(1, 200))).tolist()
        prefills = [
            Prefill(int(generator.integers(16, 2048)), int(generator.integers(0, 4000)))
            for _ in range(int(generator.integers(0, 3)))
        ]
        load = with_decodes(NOTHING, len(decodes), sum(decodes))
        for each in prefills:
            load = with_chunk(load, each.before, each.new)
        seconds = operators.step_time(ForwardPass(prefills, decodes)).sequential_s
        found.append((load, seconds * float(generator.lognormal(0.0, 0.01))))
    return found


def learned(steps: list[tuple[Load, float]]) -> Predictor:
    predictor = new_predictor(NUMBERS)
    for load, seconds in steps:
        observe(predictor, load, seconds)
    return predictor


def test_the_predictor_learns_what_the_cost_model_misses() -> None:
    predictor = learned(passes(2000, seed=0))
    errors = np.array([abs(predict(predictor, load) / seconds - 1) for load, seconds in passes(1000, seed=1)])
    before = np.array([abs(predict(new_predictor(NUMBERS), load) / s - 1) for load, s in passes(1000, seed=1)])
    assert before.mean() > 0.15
    assert errors.mean() <= 0.02
    assert np.quantile(errors, 0.99) <= 0.1
    within = np.mean([seconds <= with_margin(predictor, load) for load, seconds in passes(1000, seed=2)])
    assert within >= 0.85


def test_a_step_that_was_held_up_is_no_lesson() -> None:
    predictor = learned(passes(500, seed=0))
    load, _ = passes(1, seed=3)[0]
    before = predict(predictor, load)
    for _ in range(3):
        observe(predictor, load, 1000.0)
    for each, seconds in passes(64, seed=4):
        observe(predictor, each, seconds)
    assert predict(predictor, load) == pytest.approx(before, rel=0.3)


@given(st.integers(0, 300), st.integers(0, 200_000), st.integers(0, 4000), st.floats(0.0, 0.2), st.integers(0, 8192))
def test_the_longest_chunk_is_the_longest(decoding: int, kv: int, before: int, seconds: float, most: int) -> None:
    predictor, load = new_predictor(NUMBERS), Load(0, 0.0, 0, decoding, kv if decoding else 0)
    found = longest_chunk(predictor, load, before, seconds, most)
    assert 0 <= found <= most
    assert found == 0 or with_margin(predictor, with_chunk(load, before, found)) <= seconds
    assert found == most or with_margin(predictor, with_chunk(load, before, found + 1)) > seconds


def test_the_limit_is_the_least_of_all_bounds_and_never_below_online_alone() -> None:
    bounds = SloClass(ttft_s=2.0, tpot_s=0.05).bounds
    assert step_limit(bounds, NOT_PROFILED, 1.0, 0.01, 5, False) == 0.05
    assert step_limit(bounds, NOT_PROFILED, 0.02, 0.01, 5, False) == 0.02
    assert step_limit(bounds, NOT_PROFILED, -1.0, 0.01, 5, False) == 0.01
    assert step_limit(bounds, Profiled(0.03).numbers(), 1.0, 0.01, 5, False) == 0.03
    assert step_limit(bounds, Profiled(price_s=0.01).numbers(), 1.0, 0.01, 5, False) == pytest.approx(0.012)
    assert step_limit(bounds, Profiled(0.03).numbers(), math.inf, 0.0, 0, False) == GUARD * 2.0
    alone = Profiled(0.03, prompts_alone=True).numbers()
    assert step_limit(bounds, alone, 1.0, 0.01, 5, True) == 0.01
    assert step_limit(bounds, alone, math.inf, 0.0, 0, True) == 0.0
    assert step_limit(bounds, alone, 1.0, 0.01, 5, False) == 0.03
    no_pace = SloClass(ttft_s=2.0).bounds
    assert step_limit(no_pace, NOT_PROFILED, math.inf, 0.01, 5, False) == GUARD * 2.0


decodes = st.lists(st.tuples(st.integers(1, 20_000), st.integers(0, 2 * MOST_SKIPPED)), max_size=7)


@settings(deadline=None)
@given(st.integers(0, 50), decodes, st.floats(0.003, 0.05), st.integers(0, 2048))
def test_a_step_with_harvest_keeps_its_limit(
    online: int, batch: list[tuple[int, int]], limit_s: float, most: int
) -> None:
    predictor, load = new_predictor(NUMBERS), Load(0, 0.0, 0, online, online * 1000)
    kv, skipped = (np.array([each[k] for each in batch], dtype=np.int64) for k in range(2))
    rests = np.zeros(len(batch), dtype=np.bool_)
    found = harvest(predictor, load, kv, skipped, rests, limit_s, 0, most)
    assert found.left_out == np.count_nonzero(rests)
    whole = with_decodes(load, len(kv) - found.left_out, int(kv[~rests].sum()))
    if found.prompt_tokens:
        whole = with_chunk(whole, 0, found.prompt_tokens)
    if found.left_out < len(kv) or found.prompt_tokens:
        assert with_margin(predictor, whole) <= limit_s + 1e-12
    if found.left_out:  # brute force: no other decode fits beside the prompt tokens that ride
        riding = min(most, riding_tokens(predictor.model, online + len(kv)))
        beside = with_chunk(load, 0, riding) if riding else load
        if with_margin(predictor, beside) <= limit_s:
            order = sorted(range(len(kv)), key=lambda k: _first(int(kv[k]), int(skipped[k])))
            taken = len(kv) - found.left_out
            assert not any(rests[k] for k in order[:taken])
            more = int(kv[order[: taken + 1]].sum())
            assert with_margin(predictor, with_decodes(beside, taken + 1, more)) > limit_s


def _first(kv: int, skipped: int) -> tuple[int, int]:
    return (0, -skipped) if skipped >= MOST_SKIPPED else (1, kv - 64 * skipped)


def test_no_decode_is_left_out_for_ever() -> None:
    """Ten decodes of which one step has room for three: each comes in time."""
    predictor, kv = new_predictor(NUMBERS), np.array([10_000 * (k + 1) for k in range(10)], dtype=np.int64)
    skipped, longest = np.zeros(10, dtype=np.int64), 0
    rests = np.zeros(10, dtype=np.bool_)
    limit_s = float(predict(predictor, with_decodes(NOTHING, 2, 110_000)))
    for _ in range(1000):
        found = harvest(predictor, NOTHING, kv, skipped, rests, limit_s, 0, 0)
        assert found.left_out < 10
        skipped[:] = np.where(rests, skipped + 1, 0)
        longest = max(longest, int(skipped.max()))
    assert MOST_SKIPPED <= longest <= MOST_SKIPPED + 10


def test_harvest_falls_at_once_and_comes_back_without_swinging() -> None:
    """For 200 steps online requests leave no time; then there is time for half of the batch."""
    predictor, kv = new_predictor(NUMBERS), np.full(20, 5_000, dtype=np.int64)
    skipped, rests = np.zeros(20, dtype=np.int64), np.zeros(20, dtype=np.bool_)
    online = Load(0, 0.0, 0, 40, 40_000)
    alone_s = float(predict(predictor, online))
    half_s = float(predict(predictor, with_decodes(online, 10, 50_000)))

    def steps(count: int, limit_s: float) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for _ in range(count):
            left_out, tokens = harvest(predictor, online, kv, skipped, rests, limit_s, 0, 512)
            skipped[:] = np.where(rests, skipped + 1, 0)
            found.append((left_out, tokens))
        return found

    before, burst, after, half = steps(20, 0.05), steps(200, alone_s), steps(20, 0.05), steps(500, half_s)
    assert set(before) == set(after) == {(0, 512)}
    assert set(burst) == {(20, 0)}
    assert len(set(half)) == 1
    assert 0 < half[0][0] < 20


def test_a_reserve_grows_with_what_online_requests_hold_and_is_forgotten() -> None:
    held = new_online_kv(100_000)
    assert reserve(held) == 0
    note_online_kv(held, 50_000, 0.1)
    assert reserve(held) == 0  # a single request
    for _ in range(600):
        note_online_kv(held, 30_000, 1.0)
    note_online_kv(held, 0, 1.0)
    assert 28_000 <= reserve(held) <= 32_000  # those that are gone may come back
    note_online_kv(held, 30_000, 1.0)
    assert reserve(held) == 2_000
    for _ in range(40_000):
        note_online_kv(held, 0, 1.0)
    assert reserve(held) == 0
