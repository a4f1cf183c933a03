"""Calibration against models that are known, and against profiles that cannot be fitted."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine_ext.costs.calibrate import FEWEST_STEPS, Calibration, Profile, calibrate, typical
from engine_ext.costs.engine_model import Clock, EngineModel, compute_time, step_time
from service.errors import WorkloadError
from service.workloads.profile import MAX_LINE_BYTES, read_profile

NOISE = 0.03
TRUTH = EngineModel(
    gemm_s=5.3e-5,
    read_s=6.4e-8,
    quadratic_s=1.7e-9,
    weights_s=8.2e-3,
    capacity=400_000,
    overhead_s=1.5e-3,
    interference=0.17,
)
# How far from the truth three per cent of noise may leave each, as a share of it.
NEAR = {
    "gemm_s": 0.02,
    "weights_s": 0.03,
    "quadratic_s": 0.05,
    "read_s": 0.02,
    "overhead_s": 0.08,
    "interference": 0.08,
}


def profile(
    clock: Clock,
    noise: float = NOISE,
    operators: bool = False,
    steps: int = 800,
    seed: int = 0,
    truth: EngineModel = TRUTH,
) -> Profile:
    """Steps of the true model: chunks of 16 to 4,096 tokens, up to 512 requests decoding, both where the clock may."""
    generator = np.random.default_rng(seed)
    kinds = generator.integers(0, 2 if clock is Clock.SEQUENTIAL else 3, steps)
    prefill = np.where(kinds != 1, np.exp2(generator.uniform(4, 12, steps)).astype(int), 0)
    decoding = np.where(kinds != 0, np.exp2(generator.uniform(0, 9, steps)).astype(int), 0)
    before = generator.integers(0, 4, steps) * 1024
    quadratic = (before + prefill) ** 2.0 - before**2.0
    kv_tokens = (decoding * generator.integers(50, 3000, steps)).astype(np.float64)
    numbers = dataclasses.replace(truth, clock=clock).numbers
    seconds = np.array(
        [
            step_time(numbers, compute_time(numbers, int(tokens), float(square)), kv * truth.read_s)
            for tokens, square, kv in zip(prefill + decoding, quadratic, kv_tokens, strict=True)
        ]
    )

    def measured(times: NDArray[np.float64]) -> NDArray[np.float64]:
        return times * np.exp(generator.normal(0, noise, steps))

    found = Profile(prefill * 1.0, quadratic, decoding * 1.0, kv_tokens, measured(seconds))
    if not operators:
        return found
    alone: dict[str, NDArray[np.float64]] = {
        "gemm_s": np.maximum(found.tokens * truth.gemm_s, truth.weights_s),
        "prefill_attention_s": quadratic * truth.quadratic_s,
        "decode_attention_s": kv_tokens * truth.read_s,
    }
    rows = np.arange(steps)
    times = {name: np.where(rows % 3 == 0, np.nan, measured(column)) for name, column in alone.items()}
    return dataclasses.replace(found, **times)


def misses(found: Calibration, truth: EngineModel = TRUTH) -> dict[str, float]:
    return {name: abs(getattr(found, name) / getattr(truth, name) - 1) for name in NEAR}


def columns_of(found: Profile) -> dict[str, NDArray[np.float64]]:
    columns = {each.name: getattr(found, each.name) for each in dataclasses.fields(found)}
    return {name: column for name, column in columns.items() if column is not None}


def changed(found: Profile, name: str, row: int, value: float) -> dict[str, NDArray[np.float64]]:
    columns = columns_of(found)
    columns[name] = np.where(np.arange(len(found.seconds)) == row, value, columns[name])
    return columns


@pytest.mark.parametrize("operators", [False, True])
@pytest.mark.parametrize("clock", list(Clock))
def test_exact_steps_give_the_model_back(clock: Clock, operators: bool) -> None:
    found = calibrate(profile(clock, noise=0.0, operators=operators, steps=200), clock, TRUTH.interference)
    assert max(misses(found).values()) < 1e-6
    assert all(error.largest < 1e-6 for error in found.errors.values())


@pytest.mark.parametrize("operators", [False, True])
@pytest.mark.parametrize("clock", list(Clock))
def test_noisy_steps_give_the_model_back_within_a_few_per_cent(clock: Clock, operators: bool) -> None:
    found = calibrate(profile(clock, operators=operators), clock, TRUTH.interference)
    far = {name: miss for name, miss in misses(found).items() if miss > NEAR[name]}
    assert not far
    # The mean of |x| of a normal x is 0.8 of its deviation.
    assert found.errors["steps"].mean == pytest.approx(0.8 * NOISE, rel=0.1)


@pytest.mark.parametrize("seed", range(9))
def test_no_fit_is_worse_than_the_truth(seed: int) -> None:
    """A search that stops at a wrong split, or takes the wrong steps as bound by reads, does not reach it.

    Reads bind few steps here: the more they are hidden, the more a slow engine looks like one with short reads.
    """
    factor, share = (0.4, 0.5, 1.0)[seed // 3], (0.05, 0.15, 0.3)[seed % 3]
    truth = dataclasses.replace(TRUTH, read_s=TRUTH.read_s * factor, interference=share)
    measured = profile(Clock.OVERLAPPED, steps=250, seed=seed, truth=truth)
    exact = profile(Clock.OVERLAPPED, noise=0.0, steps=250, seed=seed, truth=truth)
    found = calibrate(measured, Clock.OVERLAPPED)
    numbers = found.model(1, Clock.OVERLAPPED).numbers
    steps = zip(measured.tokens, measured.quadratic, measured.kv_tokens, strict=True)
    fitted = np.array([step_time(numbers, compute_time(numbers, int(t), q), k * found.read_s) for t, q, k in steps])
    assert np.square(fitted / measured.seconds - 1).sum() <= np.square(exact.seconds / measured.seconds - 1).sum()


def test_operators_fix_their_parameters_and_whole_steps_the_rest() -> None:
    measured = profile(Clock.MIXED, noise=0.0, operators=True)
    slower = dataclasses.replace(measured, seconds=measured.seconds + 0.004)
    found = calibrate(slower, Clock.MIXED)
    assert found.overhead_s == pytest.approx(TRUTH.overhead_s + 0.004)
    assert [found.gemm_s, found.read_s] == pytest.approx([TRUTH.gemm_s, TRUTH.read_s])


def test_a_kernels_fixed_cost_does_not_count_as_reading() -> None:
    measured = profile(Clock.MIXED, noise=0.0, operators=True)
    assert measured.decode_attention_s is not None
    kernel = dataclasses.replace(measured, decode_attention_s=measured.decode_attention_s + 0.001)
    assert calibrate(kernel, Clock.MIXED).read_s == pytest.approx(TRUTH.read_s)


def test_interference_is_at_most_whole() -> None:
    measured = profile(Clock.OVERLAPPED, noise=0.0, operators=True)
    worse = dataclasses.replace(measured, seconds=profile(Clock.MIXED, noise=0.0).seconds * 1.2)
    assert calibrate(worse, Clock.OVERLAPPED).interference == 1.0


def test_without_overlap_the_given_interference_is_kept() -> None:
    assert calibrate(profile(Clock.SEQUENTIAL), Clock.SEQUENTIAL, interference=0.42).interference == 0.42


def test_overhead_that_is_not_there_is_none_and_never_below() -> None:
    truth = dataclasses.replace(TRUTH, overhead_s=0.0)
    for seed in range(6):
        found = calibrate(profile(Clock.MIXED, steps=300, seed=seed, truth=truth), Clock.MIXED)
        assert 0 <= found.overhead_s < 0.03 * TRUTH.weights_s


def test_errors_are_those_of_the_model_by_kind_of_step() -> None:
    measured = profile(Clock.MIXED, operators=True, steps=300)
    found = calibrate(measured, Clock.MIXED)
    numbers = found.model(1, Clock.MIXED).numbers
    steps = zip(measured.tokens, measured.quadratic, measured.kv_tokens, strict=True)
    fitted = np.array([step_time(numbers, compute_time(numbers, int(t), q), k * found.read_s) for t, q, k in steps])
    off = np.abs(fitted / measured.seconds - 1)
    stand = typical(measured)[1]
    decodes = stand[measured.prefill_tokens[stand] == 0]
    error = found.errors["decode"]
    assert (error.mean, error.largest) == pytest.approx((off[decodes].mean(), off[decodes].max()))
    assert (error.row, error.steps) == (decodes[off[decodes].argmax()], len(decodes))
    assert found.errors["steps"].steps == sum(found.errors[kind].steps for kind in ("prefill", "decode", "mixed"))
    assert set(found.errors) > {"gemm_s", "prefill_attention_s", "decode_attention_s"}
    assert "gemm_s" not in calibrate(profile(Clock.MIXED), Clock.MIXED).errors


@pytest.mark.parametrize("clock", [Clock.SEQUENTIAL, Clock.MIXED])
def test_steps_that_look_far_too_short_change_nothing(clock: Clock) -> None:
    """Each load is measured nine times, twice late or early by far; errors are relative to what was measured."""
    once, generator = profile(clock, noise=0.0, steps=200), np.random.default_rng(0)
    columns = {name: np.repeat(column, 9) for name, column in columns_of(once).items()}
    off = generator.permuted(np.tile([1e-3, 1e-2, 0.97, 0.99, 1.0, 1.01, 1.03, 3.0, 9.0], (200, 1)), axis=1)
    found = calibrate(Profile(**{**columns, "seconds": columns["seconds"] * off.ravel()}), clock, TRUTH.interference)
    assert {name: miss for name, miss in misses(found).items() if miss > NEAR[name]} == {}


def test_one_slow_step_is_named() -> None:
    measured = profile(Clock.MIXED)
    slow = Profile(**changed(measured, "seconds", 77, measured.seconds[77] * 3))
    assert calibrate(slow, Clock.MIXED).errors["steps"].row == 77


def test_a_calibration_is_an_engine_model() -> None:
    model = calibrate(profile(Clock.MIXED, noise=0.0), Clock.MIXED, 0.17).model(400_000, Clock.OVERLAPPED)
    assert model.numbers == pytest.approx(TRUTH.numbers)


@pytest.mark.parametrize(
    ("name", "row", "value", "problem"),
    [
        ("seconds", 7, 0.0, "seconds, row 7"),
        ("seconds", 7, -1.0, "seconds, row 7"),
        ("seconds", 0, np.nan, "seconds, row 0"),
        ("kv_tokens", 3, np.nan, "kv_tokens, row 3"),
        ("decoding", 3, -2.0, "decoding, row 3"),
        ("quadratic", 5, np.inf, "quadratic, row 5"),
        ("gemm_s", 1, -0.1, "gemm_s, row 1"),
        ("gemm_s", 1, 0.0, "gemm_s, row 1"),
        ("decode_attention_s", 2, np.inf, "decode_attention_s, row 2"),
    ],
)
def test_a_bad_value_is_named_with_its_row(name: str, row: int, value: float, problem: str) -> None:
    columns = changed(profile(Clock.MIXED, operators=True), name, row, value)
    with pytest.raises(ValueError, match=problem):
        Profile(**columns)


def test_loads_that_contradict_each_other_are_named() -> None:
    one = np.ones(3)
    with pytest.raises(ValueError, match="kv_tokens, row 1"):
        Profile(one, one, np.array([1.0, 0.0, 1.0]), one, one)
    with pytest.raises(ValueError, match="quadratic, row 2"):
        Profile(one, np.array([1.0, 1.0, 0.0]), one, one, one)
    with pytest.raises(ValueError, match="prefill_tokens, row 0"):
        Profile(0 * one, 0 * one, 0 * one, 0 * one, one)
    with pytest.raises(ValueError, match="kv_tokens has shape"):
        Profile(one, one, one, np.ones(2), one)


def chosen(found: Profile, rows: NDArray[np.bool_]) -> Profile:
    return Profile(**{name: column[rows] for name, column in columns_of(found).items()})


@pytest.mark.parametrize(
    ("which", "problem"),
    [
        (lambda p: np.arange(len(p.seconds)) < FEWEST_STEPS - 1, "seconds: 11 steps are too few"),
        (lambda p: p.prefill_tokens == 0, "quadratic never changes.*quadratic_s cannot be determined"),
        (lambda p: p.decoding == 0, "kv_tokens never changes.*read_s cannot be determined"),
        (lambda p: p.tokens < 100, "is too small.*gemm_s cannot be determined"),
        (lambda p: p.tokens > 300, "is too large.*weights_s"),
    ],
)
def test_steps_that_show_too_little_are_refused(which: Any, problem: str) -> None:
    measured = profile(Clock.MIXED, noise=0.0)
    with pytest.raises(ValueError, match=problem):
        calibrate(chosen(measured, which(measured)), Clock.MIXED)


def test_columns_that_change_only_together_are_refused() -> None:
    measured = profile(Clock.MIXED, noise=0.0)
    prefills = chosen(measured, measured.prefill_tokens > 0)
    alike = dataclasses.replace(prefills, decoding=np.ones(len(prefills.seconds)), kv_tokens=prefills.quadratic)
    with pytest.raises(ValueError, match="quadratic changes only together with the other columns"):
        calibrate(alike, Clock.MIXED)


@pytest.mark.parametrize("factor", [0.03, 0.2])
def test_reads_that_bind_hardly_a_step_are_refused_unless_measured_alone(factor: float) -> None:
    truth = dataclasses.replace(TRUTH, read_s=TRUTH.read_s * factor)
    with pytest.raises(ValueError, match="read_s cannot be determined"):
        calibrate(profile(Clock.OVERLAPPED, truth=truth, steps=250, seed=3), Clock.OVERLAPPED)
    found = calibrate(profile(Clock.OVERLAPPED, operators=True, truth=truth), Clock.OVERLAPPED)
    assert found.read_s == pytest.approx(truth.read_s, rel=NEAR["read_s"])


STEP = {"prefill_tokens": 0, "decoding": 2, "kv_tokens": 900, "seconds": 0.01}


def written(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "profile.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_a_profile_file_is_read_and_fitted(tmp_path: Path) -> None:
    made = profile(Clock.MIXED, operators=True, steps=200)
    counts = ("prefill_tokens", "decoding", "kv_tokens")
    steps = [
        {name: int(column[row]) if name in counts else float(column[row]) for name, column in columns_of(made).items()}
        for row in range(200)
    ]
    kept = [{name: value for name, value in step.items() if not np.isnan(value)} for step in steps]
    read = Profile(**read_profile(written(tmp_path, *(json.dumps(step) for step in kept))))
    for name, column in columns_of(made).items():
        np.testing.assert_array_equal(getattr(read, name), column)
    assert calibrate(read, Clock.MIXED) == calibrate(made, Clock.MIXED)


def test_a_prompt_starts_at_its_beginning_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    step = {"prefill_tokens": 300, "decoding": 0, "kv_tokens": 0, "seconds": 0.02}
    path = written(tmp_path, json.dumps(step), "", json.dumps(step | {"quadratic": 150_000}))
    found = read_profile(path)
    assert found["quadratic"].tolist() == [90_000, 150_000]
    assert np.isnan(found["gemm_s"]).all()


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (json.dumps(STEP | {"seconds": 0}), "line 3: .*seconds"),
        (json.dumps(STEP | {"seconds": "1"}), "line 3: .*seconds"),
        (json.dumps(STEP | {"decoding": -1}), "line 3: .*decoding"),
        (json.dumps(STEP | {"kv_tokens": 1.5}), "line 3: .*kv_tokens"),
        (json.dumps(STEP | {"kv_tokens": 0}), "line 3: kv_tokens is 0"),
        (json.dumps(STEP | {"quadratic": 5}), "line 3: quadratic is 5"),
        (json.dumps(STEP | {"gemm_s": 0}), "line 3: gemm_s"),
        (json.dumps(STEP | {"decoding": 0, "kv_tokens": 0}), "line 3: prefill_tokens and decoding"),
        (json.dumps(STEP | {"prefil": 5}), "line 3: .*prefil"),
        (json.dumps({name: STEP[name] for name in STEP if name != "seconds"}), "line 3: .*seconds"),
        ('{"prefill_tokens": 0, "decoding": 2, "kv_tokens": 900, "seconds": NaN}', "line 3: "),
        ("[" * 5000, "line 3: "),
        (" " * MAX_LINE_BYTES + "1", "line 3: the line is longer"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, problem: str) -> None:
    with pytest.raises(WorkloadError, match=rf"profile\.jsonl, {problem}"):
        read_profile(written(tmp_path, json.dumps(STEP), "", line))


def test_files_without_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="has no steps"):
        read_profile(written(tmp_path, "", ""))
    with pytest.raises(WorkloadError, match="No such file"):
        read_profile(tmp_path / "none.jsonl")
