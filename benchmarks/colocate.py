"""Compare schedulers for online requests beside a batch on the simulated engine; each row is one line of JSON.

python -m benchmarks.colocate DATA hygen [--output docs/evaluation] [--processes 2] [--only h200,0.3]

Suite `hygen` (HyGen 5.2): Azure's conversations at 30% and 60% of what the engine can do of them alone, beside four
kinds of batches. Each scheduler gets the settings with which it does most for the batch while one metric stays within a
tolerance of online requests alone. `python -m benchmarks.colocate DATA hygen --table` prints the tables of
docs/colocation.md from the rows.
"""

import argparse
import csv
import itertools
import json
import math
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import traces
from benchmarks.traces import Row
from engine_ext.arrays import Column, Floats
from engine_ext.coserve.limit import Profiled
from engine_ext.coserve.slo import SloClass
from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import Clock, EngineModel
from engine_ext.costs.hardware import Machine, hardware
from engine_ext.costs.model_shape import preset
from engine_ext.plan.buckets import LONGEST
from engine_ext.plan.prompts import Prompts
from engine_ext.simulate.arrivals import Arrivals, at_rate
from engine_ext.simulate.colocate import OURS, Measured, Settings, Traffic, run

METRICS = ("tbt_mean", "ttft_mean", "tbt_p99", "ttft_p99")
TOLERANCES = (0.05, 0.1, 0.2, 0.5)
CHUNKS = (256, 512, 1024, 2048)
LIMITS = (1.0, 1.05, 1.1, 1.125, 1.15, 1.2, 1.3, 1.5, 2.0, 3.0, 5.0, 10.0)  # times the mean TBT of online alone
PRICES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)  # times the same
RATES = tuple(np.geomspace(0.05, 50.0, 12).tolist())
MACHINES = {"h200": ("llama-3-8b", "h200", 90.0), "a100": ("llama-2-7b", "a100-40gb", 300.0)}
BATCHES = {"code": 12_000, "r1": 6_000, "mmlu": 60_000, "documents": 6_000}  # requests for both machines, never used up
NO_SLO = SloClass()
ENDLESS_S = 1e6


@dataclass(frozen=True, slots=True)
class Case:
    """One machine, online load and kind of batch. `load`: the share of what the engine can do of the online work."""

    suite: str
    machine: str
    load: float
    batch: str
    seed: int = 0


def conversations(data: Path, longest: int) -> tuple[Floats, Column, Column]:
    """Return Azure's conversations of up to `longest` tokens: arrival in seconds, prompt and output tokens."""
    rows: list[tuple[float, int, int]] = []
    with (data / "lengths" / "azure_conv_2023.csv").open() as file:
        for line in csv.DictReader(file):
            prompt, output = int(line["ContextTokens"]), int(line["GeneratedTokens"])
            if prompt >= 1 and output >= 1 and prompt + output < longest:
                rows.append((datetime.fromisoformat(line["TIMESTAMP"][:26]).timestamp(), prompt, output))
    rows.sort()
    arrives, prompt, output = (np.array(each) for each in zip(*rows, strict=True))
    return arrives - arrives[0], prompt.astype(np.int64), output.astype(np.int64)


def batch_rows(data: Path, name: str, seed: int, longest: int) -> list[Row]:
    """Return the rows of a batch in random order, without those that no engine here can hold."""
    count = BATCHES[name]
    if name == "mmlu":
        rows = traces.mmlu(data, count)
    elif name == "documents":
        rows = traces.documents(count // 6, 6, 5_000, seed)
    else:
        rows = traces.csv_trace(data, {"code": "azure_code_2023", "r1": "servegen_deepseek_r1"}[name], count, seed)
    fits = [row for row in rows if sum(size for _, size in row.segments) + row.output_tokens < longest]
    return [fits[place] for place in np.random.default_rng(seed).permutation(len(fits))]


def traffic_of(rows: list[Row], arrivals: Arrivals, prompt: Column, output: Column) -> Traffic:
    """Return the rows as a batch beside arrivals of the requests with these lengths; each has a prompt of its own."""
    numbers = zip(arrivals.copy.tolist(), arrivals.number.tolist(), strict=True)
    online = [[(f"online/{copy}/{number}", int(prompt[number]))] for copy, number in numbers]
    outputs = np.concatenate([np.array([row.output_tokens for row in rows], dtype=np.int64), output[arrivals.number]])
    prompts = Prompts.of_segments([*(row.segments for row in rows), *online])
    return Traffic.of(prompts, outputs, np.full(len(rows), LONGEST), arrivals)


def engine_of(machine: str) -> tuple[CostModel, EngineModel, float]:
    model, gpu, duration_s = MACHINES[machine]
    cost = CostModel(preset(model), Machine(hardware(gpu)))
    return cost, EngineModel.of(cost, Clock.MIXED), duration_s


def hygen(data: Path, case: Case) -> Iterator[dict[str, Any]]:
    """Yield a row for each policy, metric and tolerance: its best run."""
    cost, model, duration_s = engine_of(case.machine)
    longest = min(traces.LONGEST, model.capacity // 3)
    arrives, prompt, output = conversations(data, longest)
    rows = batch_rows(data, case.batch, case.seed, longest)

    def measure(traffic: Traffic, policy: str, settings: Settings) -> Measured:
        return run(traffic, cost, model, policy, settings, NO_SLO)

    # What the engine can do of the online work: all of it comes at once.
    generator = np.random.default_rng(case.seed)
    whole = at_rate(arrives, len(arrives) / arrives[-1], duration_s, generator)
    at_once = Arrivals(np.zeros(len(whole)), whole.number, whole.copy, ENDLESS_S)
    flood = traffic_of([], at_once, prompt, output)
    capacity = max(len(whole) / measure(flood, "online-only", Settings(chunk=chunk)).ended_s for chunk in CHUNKS)
    rate = case.load * capacity
    arrivals = at_rate(arrives, rate, duration_s, np.random.default_rng(case.seed))
    traffic = traffic_of(rows, arrivals, prompt, output)
    nobody = Arrivals(np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64), duration_s)
    alone = measure(traffic_of(rows, nobody, prompt, output), OURS, Settings(chunk=max(CHUNKS)))
    online = [measure(traffic, "online-only", Settings(chunk=chunk)) for chunk in CHUNKS]
    base = min(online, key=lambda found: found.normalized_latency)
    spare = alone.offline_tokens_per_s * (1 - rate / capacity)
    runs = [measure(traffic, policy, settings) for policy, settings in _tries(base)]
    if any(found.batch_ended == len(rows) for found in runs):
        raise ValueError(f"{case}: a run used the batch up; give it more requests")
    policies = list(dict.fromkeys(found.policy for found in runs))
    for policy, metric, tolerance in itertools.product(policies, METRICS, TOLERANCES):
        most = getattr(base, metric) * (1 + tolerance)
        mine = [found for found in runs if found.policy == policy and found.violations <= base.violations]
        kept = [found for found in mine if getattr(found, metric) <= most]
        best = max(kept, key=lambda found: found.offline_tokens_per_s, default=None)
        yield _row(case, base, best, policy, metric, tolerance, spare, len(rows))


def _tries(base: Measured) -> Iterator[tuple[str, Settings]]:
    """Yield all that is tried: each policy with its own settings, at the chunk that suits online requests alone."""
    at_best = Settings(chunk=base.settings.chunk)
    for factor in LIMITS:
        limit_s = factor * base.tbt_mean
        for policy in ("hygen", "hygen-recompute", "hygen-idle"):
            yield policy, replace(at_best, profiled=Profiled(limit_s))
        yield OURS, replace(at_best, profiled=Profiled(limit_s))
        yield OURS, replace(at_best, profiled=Profiled(limit_s, math.inf, limit_s))
    for price in PRICES:
        yield OURS, replace(at_best, profiled=Profiled(price_s=price * base.tbt_mean))
    for rate in RATES:
        yield "hygen-star", replace(at_best, rate=rate)
    for chunk in CHUNKS:
        yield "vllm-priority", Settings(chunk=chunk)
        for reserved in (1.0, 0.3):
            yield "priority", Settings(chunk=chunk, reserved=reserved)


def _row(
    case: Case,
    base: Measured,
    best: Measured | None,
    policy: str,
    metric: str,
    tolerance: float,
    spare: float,
    requests: int,
) -> dict[str, Any]:
    """Return what is written of a policy's best run; nothing is done for the batch if no run keeps the tolerance."""
    found = asdict(best if best is not None else replace(base, policy=policy, offline_tokens_per_s=0.0))
    offline, online = found["offline_tokens_per_s"], base.online_tokens_per_s
    settings = found.pop("settings")
    profiled = {name: value for name, value in settings["profiled"]._asdict().items() if math.isfinite(value)}
    found["rate"] = settings["rate"] if math.isfinite(settings["rate"]) else None
    return {
        **asdict(case),
        "metric": metric,
        "tolerance": tolerance,
        "total_over_online": (online + offline) / online,
        "share_of_spare": offline / spare,
        "chunk": settings["chunk"],
        **profiled,
        **found,
        "batch_requests": requests,
        "online_alone": {name: getattr(base, name) for name in METRICS},
    }


SUITES = {"hygen": hygen}


def cases_of(suite: str, only: Iterable[str]) -> list[Case]:
    every = [Case(suite, machine, load, batch) for machine in MACHINES for load in (0.3, 0.6) for batch in BATCHES]
    wanted = set(only)
    return [case for case in every if wanted <= {case.machine, str(case.load), case.batch}]


def run_case(data: Path, case: Case) -> list[dict[str, Any]]:
    return list(SUITES[case.suite](data, case))


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table for each machine and load: tokens of the batch per second, by policy."""
    for machine, load in sorted({(row["machine"], row["load"]) for row in rows}):
        here = [row for row in rows if (row["machine"], row["load"]) == (machine, load)]
        policies = list(dict.fromkeys(row["policy"] for row in here))
        yield f"\n{machine}, online load {load:.0%}\n"
        yield f"| batch | within | {' | '.join(policies)} | total over online alone |"
        yield f"|---|---|{'---|' * (len(policies) + 1)}"
        for batch, metric, tolerance in itertools.product(BATCHES, METRICS, TOLERANCES):
            found = {
                row["policy"]: row
                for row in here
                if (row["batch"], row["metric"], row["tolerance"]) == (batch, metric, tolerance)
            }
            if found:
                cells = " | ".join(f"{found[policy]['offline_tokens_per_s']:,.0f}" for policy in policies)
                ratio = found[OURS]["total_over_online"]
                yield f"| {batch} | {metric} +{tolerance:.0%} | {cells} | {ratio:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--output", type=Path, default=Path("docs/evaluation"))
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--only", default="", help="machine, load or batch, separated by commas")
    parser.add_argument("--table", action="store_true", help="print the rows that were written before")
    options = parser.parse_args()
    path = options.output / f"colocate-{options.suite}.jsonl"
    if options.table:
        print("\n".join(table([json.loads(line) for line in path.read_text().splitlines()])))
        return
    options.output.mkdir(parents=True, exist_ok=True)
    cases = cases_of(options.suite, (name for name in options.only.split(",") if name))
    found: dict[Case, list[dict[str, Any]]] = {}
    with ProcessPoolExecutor(options.processes) as pool:
        under_way = {pool.submit(run_case, options.data, case): case for case in cases}
        for done in as_completed(under_way):
            case = under_way[done]
            found[case] = done.result()
            print(case, flush=True)
    with path.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for case in cases for row in found[case])


if __name__ == "__main__":
    main()
