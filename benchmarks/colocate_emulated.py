"""Run schedulers for online requests beside a batch in real SGLang on an emulated machine, beside the simulator.

python -m benchmarks.colocate_emulated DATA [--suites hygen,bursts] [--output results/colocate.json]

SGLang's scheduler, radix cache, KV accounting and retraction are real. A cost model replaces the forward pass, on its
own clock, by which online requests arrive (benchmarks/engine/arrivals.py). Each policy has the setting with which it
does most for the batch in the simulator while the bounds of its suite are kept; `simulated` in a row is what the
simulator says of the same setting and the same requests. Nothing here was measured on a GPU. `deciding_ms` is real
time, so run nothing beside it.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.colocate import SLO, Case, Scene, scene
from benchmarks.emulated import deciding, tokens_of
from benchmarks.engine.bench_engine import Arriving, BenchEngine
from benchmarks.engine.tuning import MOST_TOKENS, PRIORITY, Tuning
from benchmarks.engine_process import EngineProcess
from benchmarks.simulate.beside import POLICIES as SCHEDULERS
from benchmarks.simulate.rows import row_of
from engine_ext.arrays import Column
from engine_ext.coserve.slo import SloClass
from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import EngineModel
from engine_ext.plan.buckets import LONGEST
from engine_ext.simulate.colocate import OURS
from engine_ext.simulate.colocate import run as run_ours
from engine_ext.simulate.contest import Contest, Within
from engine_ext.simulate.measured import Measured, Settings, Times, tokens_done
from engine_ext.simulate.traffic import Traffic
from service.demo.prompts import corpus
from service.demo.tiny import ensure_tiny_model

POLICIES = ("online-only", PRIORITY, OURS)


@dataclass(frozen=True, slots=True)
class Suite:
    """Names a case, and what its online requests must keep: an SLO in seconds, and by how much a metric may grow.

    `orders`: in so many orders the batch is sent to ours, whose rows are means. Where few requests run at once, it
    matters which of them are the sample.
    """

    case: Case
    slo: SloClass
    relative: Mapping[str, float]
    orders: int = 1

    def within(self, base: Measured) -> Within:
        more = 0.01 if any(math.isfinite(bound) for bound in self.slo.bounds) else 0.0
        most = {name: getattr(base, name) * (1 + share) for name, share in self.relative.items()}
        return Within(base.violations + more, most)


SUITES: Mapping[str, Suite] = {
    "hygen": Suite(Case("hygen", "h200", 0.3, "code", requests=3000), SloClass(), {"tbt_mean": 0.1}),
    "hygen-scarce": Suite(Case("hygen", "a100", 0.3, "r1", requests=1500), SloClass(), {"tbt_mean": 0.2}, orders=8),
    "slo": Suite(Case("hygen", "h200", 0.3, "r1", requests=3000), SLO, {}),
    "bursts": Suite(Case("bursts", "h200-bursts", 0.3, "code", requests=8000), SLO, {}),
    "others": Suite(Case("others", "h100", 0.4, "chat", "lmsys_chat", 7, requests=16_000), SLO, {}),
}


def run_suite(data: Path, name: str, model_path: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each policy of a suite."""
    suite = SUITES[name]
    here = scene(data, suite.case)
    in_orders = replace(SCHEDULERS[OURS], run=partial(_in_orders, suite.orders))
    contest = Contest(here.traffic, here.cost, here.model, suite.slo, {**SCHEDULERS, OURS: in_orders})
    within = suite.within(contest.base)
    best = {policy: contest.best(policy, within) for policy in (PRIORITY, OURS)}
    best["online-only"] = contest.base
    tokens, output = tokens_of(here.segments), here.traffic.output.tolist()
    make = partial(BenchEngine.emulated, model_path, here.cost, here.model.capacity, LONGEST * 2)
    with EngineProcess(make, Path(model_path).with_name(f"{name}.log")) as engine:
        base: Measured | None = None
        for policy in POLICIES:
            foreseen = best[policy]
            if foreseen is None:
                print(f"{name} {policy}: no setting keeps the bounds in the simulator", flush=True)
                continue
            if policy != "online-only" and foreseen.batch_ended == here.traffic.batch:
                raise ValueError(f"{name}: {policy} used the batch up; give it more requests")
            started, orders = time.monotonic(), suite.orders if policy == OURS else 1
            states = [_run(engine, here, suite.slo, policy, foreseen, tokens, output, seed) for seed in range(orders)]
            runs = [_measured(here, suite.slo, policy, foreseen, *each) for each in states]
            found = _mean(runs)
            base = base or found
            row = row_of(name, here.share, suite.case.batch, base, found, policy, here.alone)
            row |= {"device": f"emulated {suite.case.machine}", "chunk": foreseen.settings.chunk}
            row |= deciding(states[-1][0])
            row["simulated"] = row_of(name, here.share, suite.case.batch, contest.base, foreseen, policy, here.alone)
            row["batch_by_order"] = [each.offline_tokens_per_s for each in runs]
            yield row | {"wall_s": time.monotonic() - started}


def _run(
    engine: EngineProcess[BenchEngine],
    here: Scene,
    slo: SloClass,
    policy: str,
    foreseen: Measured,
    tokens: list[list[int]],
    output: list[int],
    seed: int,
) -> tuple[dict[str, Any], Column]:
    """Run a policy in SGLang with the setting of a simulated run.

    Returns the scheduler's state, and the batch's requests in the order in which they were sent; seed 0 is their own.
    """
    batch, settings, arrivals = here.traffic.batch, foreseen.settings, here.traffic.arrivals
    limits = {name: value for name, value in settings.profiled._asdict().items() if math.isfinite(value)}
    bounds = {"ttft_s": slo.ttft_s or NEVER_S, "tpot_s": slo.tpot_s or NEVER_S}
    tuning = Tuning(
        None if policy == OURS else policy if policy == PRIORITY else "fcfs",
        chunk=MOST_TOKENS if policy == OURS else settings.chunk,
        prompt_tokens=settings.chunk if policy == OURS else 0,
        ratio=settings.reserved,
        until_s=arrivals.duration_s,
        **bounds,
        **limits,
    )
    online = [Arriving(float(at_s), tokens[batch + k], output[batch + k]) for k, at_s in enumerate(arrivals.arrives_s)]
    alone = policy == "online-only"
    order = np.arange(batch) if seed == 0 else np.random.default_rng(seed).permutation(batch)
    sent: list[int] = [] if alone else order.tolist()
    prompts, outputs = [tokens[n] for n in sent], [output[n] for n in sent]
    return engine.do(BenchEngine.run_beside, tuning, prompts, outputs, online), order


def _in_orders(
    orders: int, traffic: Traffic, cost: CostModel, model: EngineModel, settings: Settings, slo: SloClass
) -> Measured:
    """Simulate ours with so many orders, and return the mean."""
    return _mean([run_ours(traffic, cost, model, replace(settings, seed=seed), slo) for seed in range(orders)])


def _mean(runs: list[Measured]) -> Measured:
    numbers = {each.name: getattr(runs[0], each.name) for each in fields(Measured)}
    means = {
        name: type(value)(np.mean([getattr(run, name) for run in runs]))
        for name, value in numbers.items()
        if isinstance(value, int | float)
    }
    return replace(runs[0], **means)


NEVER_S = 1e6  # a bound that nothing misses


def _measured(
    here: Scene, slo: SloClass, policy: str, foreseen: Measured, found: dict[str, Any], order: Column
) -> Measured:
    columns = {name: np.array(values) for name, values in found["online"].items()}
    count = len(columns["arrives_s"])
    times = Times(np.full(count, found["virtual_s"]), gaps=np.array(found["online_gaps"]), **columns)
    batch, duration = here.traffic.batch, here.traffic.arrivals.duration_s
    tokens = (here.traffic.lengths + here.traffic.output)[batch:][columns["ended"]].sum()
    assert isinstance(here.traffic, Traffic)
    generated = np.zeros(batch, dtype=np.int64)
    if found["batch"]:
        generated[order] = found["batch"]
    done = tokens_done(here.traffic.tree, here.traffic.output[:batch], generated, here.cost)
    return Measured(
        policy=policy,
        settings=foreseen.settings,
        online_tokens_per_s=float(tokens) / duration,
        offline_tokens_per_s=done / duration,
        **times.latencies(slo),
        preemptions=found.get("preempted", 0) + found.get("parked", 0),
        recomputed_tokens=found.get("recomputed_tokens", 0),
        restored_tokens=found.get("restored_tokens", 0),
        left_out=found.get("left_out", 0),
        steps=found["virtual_steps"],
        busy=found["virtual_s"] and (found["virtual_compute_s"] + found["virtual_reads_s"]) / found["virtual_s"],
        ended_s=float(times.last_s.max(initial=0.0)),
        batch_ended=0,
        batch_ended_tokens=0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with lengths/, text/ and tokenizers/")
    parser.add_argument("--suites", default=",".join(SUITES))
    parser.add_argument("--output", type=Path, default=Path("results/colocate.json"))
    given = parser.parse_args()
    names = given.suites.split(",")
    if unknown := [name for name in names if name not in SUITES]:
        sys.exit(f"no suite {unknown[0]!r}; choose from {', '.join(SUITES)}")
    given.output.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model_path = str(ensure_tiny_model(Path(folder) / "model", corpus()))
        for name in names:
            for row in run_suite(given.data, name, model_path):
                rows.append(row)
                given.output.write_text(json.dumps(rows, indent=1) + "\n")
                print(_line(row), flush=True)


def _line(row: dict[str, Any]) -> str:
    parts = [f"{row['suite']} {row['policy']}, {row['device']}"]
    for name in ("offline_tokens_per_s", "ttft_mean", "ttft_p99", "tbt_mean", "tbt_p99", "violations"):
        parts.append(f"{name} {row[name]:,.4g} (simulated {row['simulated'][name]:,.4g})")
    parts.append(f"deciding {row['deciding_ms']:.2f} ms, P99 {row['deciding_p99_ms']:.2f} ms")
    return ", ".join([*parts, f"{row['wall_s']:.0f} s"])


if __name__ == "__main__":
    main()
