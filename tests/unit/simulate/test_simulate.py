"""The simulated engine against closed forms, and against what no engine may do."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numba.typed import List
from typer.testing import CliRunner

from batchweave.table import command_line
from benchmarks.simulate.__main__ import app
from benchmarks.simulate.batches import POLICIES, simulate
from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import Clock, EngineModel, compute_time, step_time
from engine_ext.costs.hardware import Machine, hardware
from engine_ext.costs.model_shape import preset
from engine_ext.errors import TooLarge
from engine_ext.plan.prompts import Prompts
from engine_ext.simulate.cache import Cache, new_cache
from engine_ext.simulate.engine import Engine, admit, new_engine, step
from engine_ext.simulate.policies import Work, by_weight, prepare
from engine_ext.simulate.stock import run_stock, to_come

COST = CostModel(preset("llama-3-8b"), Machine(hardware("a100-80gb")), attention_compute=False)
GEMM_S, READ_S = COST.gemm_s_per_token, COST.read_s_per_token


def model(capacity: int = 400_000, clock: Clock = Clock.OVERLAPPED, weights_s: float = 0.0) -> EngineModel:
    """Without overhead, interference and weights, so that formulas are whole."""
    return EngineModel(GEMM_S, READ_S, 0.0, weights_s, capacity, 0.0, 0.0, clock)


def work_of(
    prompts: Sequence[Sequence[tuple[str | int, int]]], output: list[int], sample: float = 1.0, foretold: bool = True
) -> Work:
    lengths, caps = np.array(output), np.full(len(output), 4096)
    return prepare(Prompts.of_segments(prompts), lengths, COST, caps, sample=sample, foretold=foretold)


def fresh(work: Work, engine_model: EngineModel) -> tuple[Engine, Cache]:
    tree = work.tree
    leaf = np.empty(len(work.output), dtype=np.int64)
    leaf[tree.order] = tree.leaves
    cache = new_cache(tree.parent, tree.begin, tree.end, engine_model.capacity)
    return new_engine(leaf, work.lengths, work.output), cache


def typed_heap() -> list[tuple[int, int]]:
    """Empty, but of a type that the compiler can tell."""
    heap: Any = List([(0, 0)])  # pyright: ignore[reportCallIssue]
    heap.pop()
    return heap


def running(engine: Engine) -> list[int]:
    return engine.decoding[: engine.totals[0].decoding].tolist()


@pytest.mark.parametrize("policy", list(POLICIES))
def test_one_request_alone_takes_its_prompt_and_its_steps(policy: str) -> None:
    work = work_of([[("a", 1000)]], [50])
    found = simulate(work, model(clock=Clock.MIXED, weights_s=0.008), policy)
    # Prefill in chunks, none below the weights' floor here, then fifty steps that read the weights and the cache.
    reads = sum(1000 + n for n in range(50)) * READ_S
    prefill_steps = found.steps - 50
    assert prefill_steps >= 1
    prefill = found.seconds - 50 * 0.008 - reads
    assert 1000 * GEMM_S <= prefill <= 1000 * GEMM_S + prefill_steps * 0.008


@pytest.mark.parametrize("policy", list(POLICIES))
def test_everything_shared_is_computed_once(policy: str) -> None:
    work = work_of([[("a", 500)] for _ in range(20)], [10] * 20)
    found = simulate(work, model(), policy)
    assert found.sharing_kept == pytest.approx(1.0)
    assert found.sharing == pytest.approx(19 * 500 / (20 * 510))


def test_a_prefix_of_one_prefill_batch_is_computed_by_each_as_stock_sglang_does() -> None:
    """One step takes all twenty, so none finds what another computes; later ones find it."""
    work = work_of([[("a", 300), (n, 20)] for n in range(40)], [50] * 40)
    stock = replace(model(capacity=10_000, clock=Clock.SEQUENTIAL), computes_twice=True)
    engine, cache = fresh(work, stock)
    found = run_stock(engine, cache, stock.numbers, np.arange(40), np.full(40, 50.0), 6400, 1.0, False)
    first = int(np.count_nonzero(found.cached == 0))
    assert 20 <= first < 40
    assert set(found.cached.tolist()) == {0, 300}
    assert int(cache.tokens[0].computed) == first * 320 + (40 - first) * 20
    assert cache.tokens[0].free + cache.tokens[0].evictable == 10_000
    assert cache.tokens[0].locked == 0


def test_of_a_prefix_that_is_computed_in_chunks_only_the_last_is_computed_by_others_too() -> None:
    """SGLang puts every chunk into its cache before the next step."""
    work = work_of([[("a", 5000), (n, 10)] for n in range(20)], [4] * 20)
    stock = replace(model(clock=Clock.SEQUENTIAL), computes_twice=True)
    engine, cache = fresh(work, stock)
    found = run_stock(engine, cache, stock.numbers, np.arange(20), np.full(20, 4.0), 256, 1.0, False)
    cached = np.sort(found.cached)
    assert cached[0] == 0
    assert cached[1] >= 5000 - 256
    assert cached[-1] == 5000
    assert int(cache.tokens[0].computed) <= 5000 + 20 * 10 + 20 * 256
    assert cache.tokens[0].locked == 0


def test_what_is_reserved_is_the_sum_over_all_that_run() -> None:
    """Answers vary around what was expected of them; what has grown longer reserves nothing more."""
    generator = np.random.default_rng(0)
    work = work_of([[(n, 100)] for n in range(80)], generator.integers(5, 200, 80).tolist())
    engine_model = model(capacity=1_000_000)
    engine, cache = fresh(work, engine_model)
    heap, ends = typed_heap(), typed_heap()
    expected = generator.uniform(5, 200, 80)
    expected[0] = 9000.0
    for request in range(80):
        admit(engine, cache, heap, engine_model.numbers, request)
    for _ in range(100):
        step(engine, cache, heap, ends, engine_model.numbers, 256)
    got = {int(r): int(engine.output[r] - engine.ends[r] + engine.totals[0].decodes) for r in running(engine)}
    assert 0 < len(got) < 80
    wanted = sum(min(max(expected[request] - tokens, 0.0), 4096) for request, tokens in got.items())
    assert to_come(engine, expected) == pytest.approx(wanted)


def test_blendserve_lets_in_requests_whose_prompts_are_all_shared() -> None:
    work = work_of([[("a", 500)] for _ in range(300)], [50] * 300)
    assert simulate(work, model(), "blendserve").steps < 2000


def test_reads_that_cost_nothing_divide_nothing() -> None:
    prompts = [[(n, 2000)] for n in range(30)] + [[(f"l{n}", 50)] for n in range(10)]
    free = replace(model(), read_s=0.0)
    assert simulate(work_of(prompts, [10] * 30 + [600] * 10), free, "batchweave").seconds > 0


def test_what_is_computed_again_is_not_lost_sharing() -> None:
    """Expectations far too low: many are retracted, and compute their own prompts again."""
    work = work_of([[(n, 100)] for n in range(60)], [600] * 60)
    engine_model = model(capacity=8_000)
    engine, cache = fresh(work, engine_model)
    run_stock(engine, cache, engine_model.numbers, np.arange(60), np.full(60, 5.0), 2048, 0.3, False)
    assert engine.totals[0].retractions > 20
    assert int(cache.tokens[0].computed) == 60 * 100
    assert engine.totals[0].recomputed >= engine.totals[0].retractions
    assert cache.tokens[0].free + cache.tokens[0].evictable == 8_000


@pytest.mark.parametrize("policy", list(POLICIES))
def test_nothing_shared_is_computed_whole(policy: str) -> None:
    work = work_of([[(n, 300)] for n in range(20)], [10] * 20)
    found = simulate(work, model(), policy)
    assert found.sharing == pytest.approx(0.0, abs=1e-12)
    assert float(found.series[:, 1].sum()) == pytest.approx(20 * 310 * GEMM_S)


@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("clock", list(Clock))
def test_work_done_is_the_work_there_was(policy: str, clock: Clock) -> None:
    generator = np.random.default_rng(5)
    prompts = [[(f"s{n % 4}", 400), (n, int(generator.integers(1, 300)))] for n in range(120)]
    output = generator.integers(1, 200, 120).tolist()
    work = work_of(prompts, output, sample=0.1)
    found = simulate(work, model(clock=clock), policy)
    assert found.retractions == 0
    assert found.sharing_kept == pytest.approx(1.0)
    done = found.series.sum(axis=0)
    assert done[1] == pytest.approx(work.compute_s - work.best_saved_s)
    # A step reads what is cached before it: the half token of the formula's integral is not read.
    half = sum(output) * READ_S / 2
    assert done[2] == pytest.approx(work.memory_s - half)
    assert done[0] == pytest.approx(found.seconds)
    assert found.seconds >= max(done[1], done[2]) - 1e-9
    if clock is not Clock.OVERLAPPED:
        assert found.seconds == pytest.approx(done[1] + done[2])


@settings(max_examples=40)
@given(st.integers(0, 1000), st.sampled_from(list(POLICIES)), st.sampled_from([0.2, 1.0]))
@example(283, "batchweave", 0.2)
def test_a_small_cache_is_never_overfull_and_everything_ends(seed: int, policy: str, sample: float) -> None:
    generator = np.random.default_rng(seed)
    prompts = [[(f"s{n % 5}", 100), (n, int(generator.integers(1, 200)))] for n in range(60)]
    output = generator.integers(1, 400, 60).tolist()
    work = work_of(prompts, output, sample)
    found = simulate(work, model(capacity=1500), policy)
    assert found.most_kv <= 1500
    assert found.share_of_ideal <= 1 + 1e-9
    assert -1e-9 <= found.sharing_kept <= 1 + 1e-9
    assert float(found.series[:, 2].sum()) >= work.memory_s * 0.99 - sum(output) * READ_S


def test_dfs_weight_begins_with_what_came_first_and_goes_on_where_most_is_cached() -> None:
    names = ["b", "a", "a", "b", "b"]
    prompts = [[(name, 10), (f"{name}{n // 3}", 10), (n, 5)] for n, name in enumerate(names)]
    order = by_weight(work_of(prompts, [1] * 5), 0).tolist()
    assert order[:3] == [3, 4, 0]  # the subtree of request 0 comes first, its heavier half before it
    assert sorted(order[3:]) == [1, 2]


def test_prefixes_that_do_not_fit_are_lost_at_random_and_kept_depth_first() -> None:
    prompts = [[(f"document {n % 30}", 3000), (n, 50)] for n in range(180)]
    work = work_of(prompts, [20] * 180)
    kept = {policy: simulate(work, model(capacity=12_000), policy).sharing_kept for policy in ("random", "dfs")}
    assert kept["dfs"] == pytest.approx(1.0)
    assert kept["random"] < 0.7


def test_overlap_helps() -> None:
    prompts = [[(n, 800)] for n in range(200)]
    work = work_of(prompts, [100] * 200)
    seconds = [simulate(work, model(clock=clock, weights_s=0.008), "dfs").seconds for clock in Clock]
    assert seconds[0] < 0.95 * min(seconds[1:])


def test_ours_beats_any_fixed_order_where_ends_differ() -> None:
    """Half the work is prompts, half is long answers: an order that runs them apart cannot overlap them."""
    prompts = [[("dense", 20), (n, 2000)] for n in range(600)] + [[("light", 20), (f"l{n}", 50)] for n in range(60)]
    work = work_of(prompts, [10] * 600 + [6000] * 60)
    engine = model(capacity=100_000)
    ours, depth_first = (simulate(work, engine, policy) for policy in ("batchweave", "dfs"))
    assert ours.seconds < 0.8 * depth_first.seconds
    assert ours.share_of_ideal > 0.75


def test_what_is_learned_only_while_it_runs_is_soon_known() -> None:
    prompts = [[(f"d{n}", 2000)] for n in range(600)] + [[(f"m{n}", 40)] for n in range(120)]
    output = [2] * 600 + [2000] * 120
    known, foretold, learned = (
        simulate(work_of(prompts, output, sample, foretold), model(), "batchweave")
        for sample, foretold in ((1.0, True), (0.05, True), (0.05, False))
    )
    assert known.seconds <= 1.02 * foretold.seconds
    assert foretold.seconds <= 1.02 * learned.seconds
    assert learned.seconds < 1.2 * known.seconds
    nobody = simulate(work_of(prompts, output, 0.05), model(), "fcfs")
    assert learned.seconds < 0.95 * nobody.seconds


def test_no_gemm_waits_for_the_weights_where_long_prompts_are_the_larger_part() -> None:
    """Attention is most of their compute: a step that hid it too would have few tokens, and pay for the weights."""
    generator = np.random.default_rng(0)
    lengths, output = generator.integers(20_000, 80_000, 150), generator.integers(10, 1800, 150)
    cost = CostModel(preset("llama-3-8b"), Machine(hardware("a100-80gb")))
    prompts = Prompts.of_segments([[(n, int(size))] for n, size in enumerate(lengths)])
    work = prepare(prompts, output, cost, np.full(150, 4096), sample=1.0)
    assert work.compute_s > 2 * work.memory_s
    assert simulate(work, EngineModel.of(cost), "batchweave").share_of_practical > 0.97


def test_ours_keeps_up_where_nothing_overlaps() -> None:
    """A prefill stops decoding there, and a step that only decodes reads the weights for itself."""
    prompts = [[("dense", 20), (n, 2000)] for n in range(1200)] + [[("light", 20), (f"l{n}", 50)] for n in range(240)]
    work = work_of(prompts, [10] * 1200 + np.random.default_rng(0).integers(500, 9000, 240).tolist(), 0.1)
    engine = model(capacity=300_000, clock=Clock.SEQUENTIAL, weights_s=0.008)
    ours, depth_first = (simulate(work, engine, policy) for policy in ("batchweave", "dfs"))
    assert ours.seconds < 1.05 * depth_first.seconds


def test_a_request_that_no_cache_holds_is_named() -> None:
    work = work_of([[("a", 10)], [("b", 5000)]], [1, 1])
    with pytest.raises(TooLarge) as raised:
        simulate(work, model(capacity=1000), "dfs")
    assert raised.value.number == 1


def lines(tmp_path: Path, rows: list[dict[str, object]]) -> Path:
    path = tmp_path / "w.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_of_the_command(tmp_path: Path) -> None:
    path = lines(tmp_path, [{"segments": [["s", 50], [n, 100]], "output_tokens": 5 + n} for n in range(40)])
    arguments = ["simulate", "--workload", str(path), "--gpu", "a100-80gb", "--policies", "lpm-default,batchweave"]
    found = CliRunner().invoke(command_line("simulate"), [*arguments, "--json"])
    rows = json.loads(found.stdout)
    assert [row["policy"] for row in rows] == ["lpm-default", "batchweave"]
    assert rows[0]["setting"] == "chunk 8192, ratio 0.7"
    keys = (
        "policy seconds tokens_per_s share_of_ideal share_of_practical sharing sharing_kept retractions steps planner_s"
    )
    assert all(set(row) >= set(keys.split()) for row in rows)
    assert "batchweave" in CliRunner().invoke(command_line("simulate"), arguments).stdout
    research = CliRunner().invoke(app, ["--workload", str(path), "--policies", "blendserve,batchweave", "--json"])
    assert [tuple(row) for row in json.loads(research.stdout)] == [tuple(row) for row in rows]


@pytest.mark.parametrize(("gpu", "chunk"), [("l40s", 4096), ("a100-80gb", 8192), ("h200", 8192), ("b200", 16384)])
def test_sglang_at_its_defaults_has_the_chunk_of_the_gpu(tmp_path: Path, gpu: str, chunk: int) -> None:
    path = lines(tmp_path, [{"segments": [["s", 50], [n, 100]], "output_tokens": 5} for n in range(8)])
    arguments = ["simulate", "--workload", str(path), "--gpu", gpu, "--policies", "fcfs-default", "--json"]
    [row] = json.loads(CliRunner().invoke(command_line("simulate"), arguments).stdout)
    assert row["setting"] == f"chunk {chunk}, ratio 0.7"


def test_a_profile_replaces_the_datasheet_and_the_race_is_drawn(tmp_path: Path) -> None:
    """Steps of an engine half as fast as the datasheet: it takes twice as long."""
    path = lines(tmp_path, [{"segments": [["s", 50], [n, 1000]], "output_tokens": 60} for n in range(200)])
    slow = EngineModel.of(CostModel(preset("llama-3-8b"), Machine(hardware("a100-80gb"))), Clock.MIXED).numbers
    slow = slow._replace(
        gemm_s=2 * slow.gemm_s, read_s=2 * slow.read_s, quadratic_s=2 * slow.quadratic_s, weights_s=2 * slow.weights_s
    )
    steps: list[dict[str, float]] = []
    for size in (64, 256, 1024, 4096):
        for kv in (0, 5_000, 60_000, 300_000):
            decoding = kv // 1000
            seconds = step_time(slow, compute_time(slow, size + decoding, float(size) ** 2), kv * slow.read_s)
            steps.append({"prefill_tokens": size, "decoding": decoding, "kv_tokens": kv, "seconds": seconds})
            if kv:
                seconds = step_time(slow, compute_time(slow, decoding, 0.0), kv * slow.read_s)
                steps.append({"prefill_tokens": 0, "decoding": decoding, "kv_tokens": kv, "seconds": seconds})
    profile, plot = tmp_path / "profile.jsonl", tmp_path / "race.png"
    profile.write_text("".join(json.dumps(step) + "\n" for step in steps))
    arguments = ["--workload", str(path), "--gpu", "a100-80gb", "--policies", "dfs", "--json", "--interference", "0"]
    plain = CliRunner().invoke(app, arguments)
    fitted = CliRunner().invoke(app, [*arguments, "--profile", str(profile), "--plot", str(plot)])
    assert fitted.exit_code == 0, fitted.stderr
    assert "fit of steps: off by 0.0%" in fitted.stderr
    hindered = CliRunner().invoke(app, [*arguments, "--profile", str(profile), "--interference", "0.5"])
    assert json.loads(hindered.stdout)[0]["seconds"] > 1.02 * json.loads(fitted.stdout)[0]["seconds"]
    assert json.loads(fitted.stdout)[0]["seconds"] == pytest.approx(
        2 * json.loads(plain.stdout)[0]["seconds"], rel=0.02
    )
    assert json.loads(fitted.stdout)[0]["share_of_ideal"] <= 1
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["--policies", "fcfs,magic"], "no policy 'magic'"),
        (["--policies", ","], "no policies are named"),
        (["--profile", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--profile-clock", "quartz"], "no clock 'quartz'"),
        (["--clock", "quartz"], "no clock 'quartz'"),
        (["--sample", "0"], "share to sample"),
        (["--gpu", "h900"], "no hardware"),
    ],
)
def test_bad_options_of_the_command(tmp_path: Path, more: list[str], problem: str) -> None:
    path = lines(tmp_path, [{"segments": [["s", 50]], "output_tokens": 5}])
    found = CliRunner().invoke(command_line("simulate"), ["simulate", "--workload", str(path), *more])
    assert (found.exit_code, problem in found.stderr) == (1, True)
    research = CliRunner().invoke(app, ["--workload", str(path), *more])
    assert (research.exit_code, problem in research.stderr) == (1, True)


@pytest.mark.parametrize(
    ("plot", "problem"), [("race.txt", "must end in one of .png"), ("nowhere/race.png", "no such folder")]
)
def test_a_picture_that_cannot_be_drawn_is_named(tmp_path: Path, plot: str, problem: str) -> None:
    path = lines(tmp_path, [{"segments": [["s", 50]], "output_tokens": 5}])
    found = CliRunner().invoke(app, ["--workload", str(path), "--plot", plot])
    assert (found.exit_code, problem in found.stderr) == (1, True)
