"""Policies in real SGLang on an emulated H200 with little KV memory: what is let in, found in the cache, and how long.

Three kinds of work: prompts beside long answers, documents that do not all fit into the KV cache, and one prefix.
"""

import asyncio
from collections.abc import Generator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.engine.bench_engine import Arriving, BenchEngine
from benchmarks.engine.tuning import Tuning
from benchmarks.engine_process import EngineProcess
from benchmarks.simulate.batches import simulate
from benchmarks.simulate.beside import run as run_simulated
from engine_ext.coserve.slo import SloClass
from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import Clock, EngineModel
from engine_ext.costs.hardware import Machine, hardware
from engine_ext.costs.model_shape import preset
from engine_ext.plan.buckets import LONGEST
from engine_ext.plan.prompts import Prompts
from engine_ext.plan.tuning import SAMPLE
from engine_ext.plugin.scheduler import emulated as devices
from engine_ext.plugin.scheduler.emulated import Device
from engine_ext.simulate.arrivals import Arrivals
from engine_ext.simulate.colocate import OURS
from engine_ext.simulate.measured import Settings, Times, tokens_done
from engine_ext.simulate.policies import Search, Work, prepare
from engine_ext.simulate.traffic import Traffic

Emulated = EngineProcess[BenchEngine]
COST = CostModel(preset("llama-3-8b"), Machine(hardware("h200")))
CAPACITY = 60_000
CHUNK, RATIO = 1024, 0.6
DECODES = 256  # about as many run at once


def workload(name: str) -> tuple[list[list[int]], list[int]]:
    generator = np.random.default_rng(3)

    def tokens(count: int) -> list[int]:
        return generator.integers(10, 900, count).tolist()

    if name == "both ends":
        dense = [(tokens(int(generator.integers(500, 1500))), 4) for _ in range(250)]
        light = [(tokens(40), int(generator.integers(300, 1500))) for _ in range(80)]
        found = dense + light
    elif name == "documents":
        shared = [tokens(3000) for _ in range(40)]
        found = [(shared[n % 40] + tokens(30), 40) for n in range(200)]
        found += [(tokens(40), int(generator.integers(300, 1500))) for _ in range(60)]
    else:
        shared = [tokens(800)]
        found = [(shared[0] + tokens(60), int(generator.integers(20, 200))) for _ in range(250)]
    order = generator.permutation(len(found)).tolist()
    return [found[n][0] for n in order], [found[n][1] for n in order]


@pytest.fixture(scope="module")
def emulated(demo: Path, log: Path) -> Generator[Emulated, None, None]:
    with EngineProcess(partial(BenchEngine.emulated, str(demo), COST, CAPACITY, 1 << 14), log) as engine:
        yield engine


def run(
    engine: Emulated, policy: str | None, clock: Clock, prompts: list[list[int]], outputs: list[int]
) -> dict[str, Any]:
    tuning = Tuning(policy, CHUNK, RATIO, clock=clock) if policy else Tuning(clock=clock)
    return engine.do(BenchEngine.run, tuning, prompts, outputs)


def work_of(prompts: list[list[int]], outputs: list[int], sample: float) -> Work:
    """In an engine nobody knows a length before its answer has ended."""
    lengths, caps = np.array(outputs), np.full(len(outputs), LONGEST)
    return prepare(Prompts.of(prompts), lengths, COST, caps, sample=sample, foretold=False)


@pytest.mark.parametrize("clock", list(Clock))
@pytest.mark.parametrize("name", ["both ends", pytest.param("documents", marks=pytest.mark.slow), "one prefix"])
def test_the_scan_runs_in_sglang_as_the_simulator_says(emulated: Emulated, name: str, clock: Clock) -> None:
    prompts, outputs = workload(name)
    told, untold = (work_of(prompts, outputs, share) for share in (1.0, SAMPLE))
    model = replace(EngineModel.of(COST, clock), capacity=CAPACITY)
    ours = run(emulated, None, clock, prompts, outputs)
    theirs = run(emulated, "fcfs", clock, prompts, outputs)
    search = Search(chunks=(CHUNK,), ratios=(RATIO,))
    expected = simulate(untold, model, "batchweave")
    assert (theirs["scheduling"], ours["scheduling"]) == ("sglang", "dual-scan")  # nothing of ours slows it down
    expected_theirs = simulate(told, replace(model, computes_twice=True), "fcfs", search=search)
    total = sum(len(prompt) for prompt in prompts)
    possible = total - told.tree.distinct_tokens
    print(
        f"{name}, {clock.name.lower()}: ours {ours['virtual_s']:.2f} s (simulated {expected.seconds:.2f}), cached "
        f"{ours['cached_tokens']} of {possible}, {ours['retractions']} retracted; fcfs {theirs['virtual_s']:.2f} s "
        f"(simulated {expected_theirs.seconds:.2f}), cached {theirs['cached_tokens']}"
    )
    assert ours["device"] == f"emulated 1 x h200, {clock.name.lower()} clock"
    assert ours["admitted"] == len(prompts) + ours["retractions"]
    assert (ours["waiting"], ours["running"]) == (0, 0)
    if not ours["retractions"]:
        assert ours["computed_prompt_tokens"] + ours["cached_tokens"] == total
    # A fuller cache evicts some of the sample's prefixes before the rest of their requests come.
    kept = 0.96 if clock is Clock.SEQUENTIAL else 0.97
    assert ours["computed_prompt_tokens"] - ours["retracted_tokens"] <= total - kept * possible + 100
    assert ours["retractions"] <= 0.05 * len(prompts)
    assert theirs["virtual_s"] == pytest.approx(expected_theirs.seconds, rel=0.05)
    assert ours["virtual_s"] == pytest.approx(expected.seconds, rel=0.05)


@pytest.mark.parametrize("bounds", [{"tpot_s": 0.005}, {"tpot_s": 0.05}, {"tpot_s": 0.05, "limit_s": 0.005}])
def test_online_tokens_come_in_time_beside_a_batch(emulated: Emulated, bounds: dict[str, float]) -> None:
    """Tight bounds leave the batch fewer prompt tokens in a step; the loose one is longer than any step here."""
    prompts, outputs = workload("both ends")

    async def main(engine: BenchEngine) -> dict[str, Any]:
        tuning = replace(Tuning(chunk=CHUNK, clock=Clock.MIXED), **bounds)
        running = asyncio.create_task(engine.run(tuning, prompts, outputs))
        while (await engine.state())["waiting"] == 0:  # it begins when all of them wait
            await asyncio.sleep(0.001)
        asked = [engine.ask(f"online-{number}", [7] * 40, 200) for number in range(4)]
        answers = await asyncio.gather(*asked)
        assert [len(found["answer"]) for found in answers] == [200] * 4
        await running
        return await engine.state()

    found = emulated.do(main)
    assert (found["online_ended"], found["online_late"]) == (4, 0)
    assert (found["limited_steps"] > 0) == (min(bounds.values()) == 0.005)
    assert found["online_tpot_s"] <= 0.005
    assert (found["waiting"], found["running"], found["kv_kept"]) == (0, 0, 0)


def beside() -> Traffic:
    """Four online requests a second for ten seconds, beside a batch that lasts longer."""
    generator = np.random.default_rng(5)
    times = np.sort(generator.uniform(0.0, 10.0, 40))
    batch, online = [int(n) for n in generator.integers(100, 900, 800)], generator.integers(50, 700, len(times))
    prompts = [[(f"batch {k}", size)] for k, size in enumerate(batch)]
    prompts += [[(f"online {k}", int(size))] for k, size in enumerate(online)]
    output = np.concatenate([generator.integers(20, 400, len(batch)), generator.integers(5, 80, len(times))])
    arrivals = Arrivals(times, np.arange(len(times)), np.zeros(len(times), dtype=np.int64), 10.0)
    return Traffic.of(Prompts.of_segments(prompts), output, np.full(len(batch), LONGEST), arrivals)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "named"), [("online-only", "fcfs"), ("priority", "priority"), (OURS, None)])
def test_online_requests_arrive_by_the_clock_of_the_device(emulated: Emulated, policy: str, named: str | None) -> None:
    """Both sides get what the simulator says, with requests that come before, during and after work of the batch."""
    found, generator = beside(), np.random.default_rng(6)
    ids = [generator.integers(10, 900, int(length)).tolist() for length in found.lengths]
    output, arrives_s = found.output.tolist(), found.arrivals.arrives_s.tolist()
    count = 0 if policy == "online-only" else found.batch
    online = [Arriving(at_s, ids[found.batch + k], output[found.batch + k]) for k, at_s in enumerate(arrives_s)]
    tuning = Tuning(named, CHUNK, RATIO, until_s=10.0)
    if policy == OURS:
        # Decodes take part of SGLang's chunk, and leave room for as many prompt tokens as the simulator has.
        tuning = Tuning(named, CHUNK + DECODES, RATIO, until_s=10.0, prompt_tokens=CHUNK)
    got = emulated.do(BenchEngine.run_beside, tuning, ids[:count], output[:count], online)
    columns = {name: np.array(values) for name, values in got["online"].items()}
    assert np.all(columns["ended"])
    assert np.all(columns["first_s"] > columns["arrives_s"])
    assert sorted(columns["arrives_s"].tolist()) == pytest.approx(arrives_s)
    assert columns["generated"].sum() == sum(each.output for each in online)
    times = Times(np.full(len(online), got["virtual_s"]), gaps=np.array(got["online_gaps"]), **columns)
    model, slo = replace(EngineModel.of(COST, Clock.MIXED), capacity=CAPACITY), SloClass(ttft_s=1.0, tpot_s=0.05)
    expected, here = (
        run_simulated(found, COST, model, policy, Settings(CHUNK, reserved=RATIO), slo),
        times.latencies(slo),
    )
    tokens = tokens_done(found.tree, found.output[:count], np.array(got["batch"]), COST) / 10.0
    print(f"{policy}: {tokens} tokens/s of the batch (simulated {expected.offline_tokens_per_s}), {here} ({expected})")
    assert here["tbt_mean"] == pytest.approx(expected.tbt_mean, rel=0.05)
    assert here["ttft_mean"] == pytest.approx(expected.ttft_mean, rel=0.3)
    assert tokens == pytest.approx(expected.offline_tokens_per_s, rel=0.05)
    assert got["held"] == 0


def test_steps_in_real_time_follow_each_other() -> None:
    device = Device(COST, Clock.MIXED, lasts=True)
    assert [device.launch(10.0, 0.5), device.launch(10.1, 0.5)] == [10.5, 11.0]  # the second waits for the first
    assert device.launch(20.0, 0.5) == 20.5  # nothing was under way


@pytest.mark.parametrize("lasts", [False, True])
def test_a_step_outlasts_its_launch_in_real_time_alone(monkeypatch: pytest.MonkeyPatch, lasts: bool) -> None:
    monkeypatch.setattr(devices, "_device", Device(COST, Clock.MIXED, lasts))
    assert devices.outlasts_launch() is lasts
    assert (devices.clock() is None) is lasts
