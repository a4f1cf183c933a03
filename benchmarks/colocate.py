"""Compare schedulers for online requests beside a batch on the simulated engine; each row is one line of JSON.

python -m benchmarks.colocate DATA SUITE [--output docs/evaluation] [--processes 2] [--only h200,0.3]
python -m benchmarks.colocate DATA SUITE --table     # the rows that were written before, as tables

Each scheduler gets the settings with which it does most for the batch while online requests keep what a row says.
hygen   HyGen 5.2: Azure's conversations at 30% and 60% of what the engine can do of them alone, beside four kinds of
        batches. One metric stays within a tolerance of online requests alone, or an SLO in seconds is kept.
bros    BROS VII: ShareGPT's lengths at 4, 8 and 12 requests a second, beside a batch in closed groups of 512.
ooco    OOCO 5.2: two engines, in pools or side by side, at the rate of online requests that the pools can just do.
bursts  The busiest five minutes of the conversations three times as dense; Mooncake's prompts of up to 100,000 tokens.
others  Traces, machines and seeds that were not used while the scheduler was made.
"""

import argparse
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import online_traffic, traces
from benchmarks.online_traffic import Online, batch_rows, beside, pair_beside
from benchmarks.simulate.beside import BROS, ORACLE, POLICIES
from benchmarks.simulate.pair import ON_PAIRS, ONLINE_PD, PAIR_POLICIES, Pair
from benchmarks.simulate.rows import batch_alone, row_of
from benchmarks.traces import Row
from engine_ext.coserve.slo import SloClass
from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import Clock, EngineModel
from engine_ext.costs.hardware import Machine, hardware
from engine_ext.costs.model_shape import preset
from engine_ext.plan.prompts import Segment
from engine_ext.simulate.arrivals import Arrivals, at_rate, denser
from engine_ext.simulate.colocate import OURS
from engine_ext.simulate.contest import CHUNKS, Contest, Within, online_capacity
from engine_ext.simulate.measured import Measured, Settings
from engine_ext.simulate.traffic import Traffic

METRICS = ("tbt_mean", "ttft_mean", "tbt_p99", "ttft_p99")
TOLERANCES = (0.05, 0.1, 0.2, 0.5)
SLO = SloClass(ttft_s=1.0, tpot_s=0.05)
OOCO_SLO = SloClass(ttft_s=2.0, tpot_s=0.05, percentile=0.97)
OOCO_MISSED = 0.03
BROS_SLO = SloClass(ttft_s=0.4, tpot_s=0.2)
FLOOD_S = 120.0  # of the trace, all at once, to see what the engine can do
CLOSE = 0.005  # by which two schedulers count as equal
RIVALS = ("hygen", "hygen-recompute", "hygen-idle", "hygen-star", "vllm-priority", "priority")


@dataclass(frozen=True, slots=True)
class Place:
    """Describes a model on a machine, and for how long a run there lasts."""

    model: str
    gpu: str
    duration_s: float
    tp: int = 1

    def engine(self) -> tuple[CostModel, EngineModel]:
        cost = CostModel(preset(self.model), Machine(hardware(self.gpu), tp=self.tp))
        return cost, EngineModel.of(cost, Clock.MIXED)


MACHINES = {
    "h200": Place("llama-3-8b", "h200", 90.0),
    "a100": Place("llama-2-7b", "a100-40gb", 300.0),
    "a100x2": Place("qwen-2.5-14b", "a100-40gb", 600.0, tp=2),
    "a100s": Place("qwen-2.5-7b", "a100-80gb", 1200.0),
    "h200-bursts": Place("llama-3-8b", "h200", 300.0),
    "h100": Place("qwen-2.5-7b", "h100", 120.0),
    "a100-70b": Place("llama-3-70b", "a100-80gb", 300.0, tp=8),
}


@dataclass(frozen=True, slots=True)
class Case:
    """Names one machine, online load and kind of batch.

    `load`: the share of what the engine can do of the online work, or requests per second where a suite says so.
    `requests`: those of the batch; None for as many as no policy uses up.
    """

    suite: str
    machine: str
    load: float
    batch: str
    online: str = "conversations"
    seed: int = 0
    requests: int | None = None


@dataclass(frozen=True, slots=True)
class Scene:
    """Holds what a case plays: the traffic on an engine, the batch alone on it, and the online load as a share.

    `segments`: the prompts of the batch, then of the online requests, for those who run it elsewhere too.
    """

    case: Case
    cost: CostModel
    model: EngineModel
    traffic: Traffic | Pair
    alone: Measured
    share: float
    segments: Sequence[Sequence[Segment]] = ()

    def contest(self, slo: SloClass) -> Contest:
        return Contest(self.traffic, self.cost, self.model, slo, POLICIES)

    def row(self, contest: Contest, best: Measured | None, policy: str, **said: Any) -> dict[str, Any]:
        """Return a row for a policy's best run, with what the case and the caller say of it."""
        if best is not None and best.batch_ended == self.traffic.batch:
            raise ValueError(f"{self.case}: {policy} used the batch up; give it more requests")
        row = row_of(self.case.suite, self.share, self.case.batch, contest.base, best, policy, self.alone)
        found = {} if best is None else asdict(best)
        settings = found.pop("settings", {})
        settings.pop("seed", None)  # the case has one too
        profiled = settings.pop("profiled", contest.base.settings.profiled)._asdict()
        finite = {name: value for name, value in {**profiled, **settings}.items() if math.isfinite(value)}
        base = {name: getattr(contest.base, name) for name in (*METRICS, "violations", "normalized_latency")}
        return {**asdict(self.case), **said, **row, **{k: v for k, v in found.items() if k not in row}, **finite} | {
            "online_alone": base,
            "load": self.share,
        }


def scene(data: Path, case: Case) -> Scene:
    """Make the traffic of a case whose load is a share of what the engine can do."""
    place = MACHINES[case.machine]
    cost, model = place.engine()
    longest = min(traces.LONGEST, model.capacity // 3)
    if case.online == "mooncake":
        longest = min(131_072, model.capacity // 3)
    online = _online(data, case, longest)
    generator = np.random.default_rng(case.seed)
    own_rate = len(online.arrives_s) / online.arrives_s[-1]
    capacity = online_capacity(*online.at(at_rate(online.arrives_s, own_rate, FLOOD_S, generator)), cost, model)
    rate = case.load * capacity
    arrivals = at_rate(online.arrives_s, rate, place.duration_s, generator)
    if case.suite == "bursts" and case.online == "conversations":
        arrivals = _busiest(online, rate, place.duration_s, generator)
    rows = batch_rows(data, case.batch, case.seed, min(longest, traces.LONGEST), case.requests)
    traffic = beside(rows, online, arrivals)
    segments = [*(row.segments for row in rows), *online.named(arrivals)]
    return Scene(case, cost, model, traffic, batch_alone(traffic, cost, model), arrivals.rate / capacity, segments)


def _online(data: Path, case: Case, longest: int) -> Online:
    if case.online == "conversations":
        return online_traffic.conversations(data, longest)
    if case.online == "mooncake":
        return online_traffic.mooncake(data, longest)
    return online_traffic.poisson(data, case.online, longest, 10.0, 600.0, case.seed)


def _busiest(online: Online, rate: float, duration_s: float, generator: np.random.Generator) -> Arrivals:
    """Return the busiest window of the trace at this rate, with a minute in it that is three times as dense."""
    whole = at_rate(online.arrives_s, rate, float(online.arrives_s[-1]), generator)
    counts = np.searchsorted(whole.arrives_s, whole.arrives_s + duration_s) - np.arange(len(whole))
    first = int(counts.argmax())
    chosen = slice(first, first + int(counts[first]))
    begin = whole.arrives_s[first]
    window = Arrivals(whole.arrives_s[chosen] - begin, whole.number[chosen], whole.copy[chosen], duration_s)
    return denser(window, duration_s / 2, duration_s / 2 + 60.0, 3, generator)


def hygen(data: Path, case: Case) -> Iterator[dict[str, Any]]:
    """Yield a row for each policy, metric and tolerance, and one for an SLO in seconds: its best run."""
    here = scene(data, case)
    contest = here.contest(SloClass())
    for policy, metric, tolerance in itertools.product((*RIVALS, OURS), METRICS, TOLERANCES):
        within = Within(most={metric: getattr(contest.base, metric) * (1 + tolerance)})
        yield here.row(contest, contest.best(policy, within), policy, metric=metric, tolerance=tolerance)
    yield from _in_time(here, SLO, 0.01, ("hygen", "hygen-idle", "vllm-priority", "priority", ORACLE, OURS))


def bursts(data: Path, case: Case) -> Iterator[dict[str, Any]]:
    """Yield a row for each policy: its best run with at most one more violation in a hundred than online alone."""
    yield from _in_time(
        scene(data, case), SLO, 0.01, ("hygen", "hygen-idle", "vllm-priority", "priority", ORACLE, OURS)
    )


def _in_time(here: Scene, slo: SloClass, more: float, policies: Iterable[str]) -> Iterator[dict[str, Any]]:
    contest = here.contest(slo)
    within = Within(violations=contest.base.violations + more)
    for policy in policies:
        yield here.row(contest, contest.best(policy, within), policy, metric="slo", tolerance=more)


def bros(data: Path, case: Case) -> Iterator[dict[str, Any]]:
    """Yield a row for every run: each policy at each setting. `load` is in requests per second."""
    place = MACHINES[case.machine]
    cost, model = place.engine()
    longest = min(4096, model.capacity // 3)
    online = online_traffic.poisson(data, "sharegpt", longest, case.load, place.duration_s, case.seed)
    count = len(online.arrives_s)
    arrivals = Arrivals(online.arrives_s, np.arange(count), np.zeros(count, dtype=np.int64), place.duration_s)
    rows = batch_rows(data, case.batch, case.seed, longest)
    traffic = beside(rows, online, arrivals, 512)
    share = case.load / online_capacity(*online.at(arrivals), cost, model)
    alone = batch_alone(traffic, cost, model)
    here = Scene(case, cost, model, traffic, alone, share)
    contest = here.contest(BROS_SLO)
    for policy in ("fcfs", "round-robin", "priority", "vllm-priority", BROS, OURS):
        contest.best(policy, Within(violations=0.01))
        if policy == OURS:
            contest.best(policy, Within(most={"tbt_mean": 2 * contest.base.tbt_mean}))
        for (name, _), found in list(contest.runs.items()):
            if name == policy:
                yield here.row(contest, found, policy, metric="every", tolerance=0.0, rate=case.load)


def ooco(data: Path, case: Case) -> Iterator[dict[str, Any]]:
    """Yield a row for each policy on two engines; `load` is a share of the pools' peak."""
    place = MACHINES[case.machine]
    cost, model = place.engine()
    longest = min(traces.LONGEST, model.capacity // 3)
    online = online_traffic.conversations(data, longest)
    if case.online == "ooc":
        online = online_traffic.lognormal(online.arrives_s, longest, online_traffic.OOC_ONLINE, case.seed)
    rows = batch_rows(data, case.batch, case.seed, longest)

    def at(rate: float, batch: list[Row]) -> Contest:
        arrivals = at_rate(online.arrives_s, rate, place.duration_s, np.random.default_rng(case.seed))
        return Contest(pair_beside(batch, online, arrivals), cost, model, OOCO_SLO, ON_PAIRS)

    least, most = 0.0, 64.0
    while most - least > 0.25:
        rate = (least + most) / 2
        alone = at(rate, []).measure(ONLINE_PD, Settings(chunk=max(CHUNKS)))
        least, most = (rate, most) if alone.violations <= OOCO_MISSED else (least, rate)
    contest = at(case.load * least, rows)
    traffic = contest.traffic
    capacity = 2 * online_capacity(*online.at(traffic.arrivals), cost, model)
    here = Scene(case, cost, model, traffic, batch_alone(traffic, cost, model), traffic.arrivals.rate / capacity)
    for policy in PAIR_POLICIES:
        best = contest.best(policy, Within(violations=OOCO_MISSED))
        yield here.row(contest, best, policy, metric="slo", tolerance=OOCO_MISSED, rate=traffic.arrivals.rate)


SUITES: Mapping[str, tuple[Callable[[Path, Case], Iterator[dict[str, Any]]], tuple[Case, ...]]] = {
    "hygen": (
        hygen,
        tuple(
            Case("hygen", machine, load, batch)
            for machine, load, batch in itertools.product(
                ("h200", "a100"), (0.3, 0.6), ("code", "r1", "mmlu", "documents")
            )
        ),
    ),
    "bros": (bros, tuple(Case("bros", "a100x2", rate, "uniform", "sharegpt") for rate in (4.0, 8.0, 12.0))),
    "ooco": (
        ooco,
        tuple(
            Case("ooco", "a100s", load, "ooc", online)
            for online, load in itertools.product(("ooc", "conversations"), (1.0, 0.5))
        ),
    ),
    "bursts": (
        bursts,
        tuple(
            Case("bursts", "h200-bursts", 0.3, batch, online)
            for batch, online in itertools.product(("code", "r1"), ("conversations", "mooncake"))
        ),
    ),
    "others": (
        bursts,
        (
            Case("others", "h100", 0.4, "chat", "lmsys_chat", 7),
            Case("others", "h100", 0.7, "r1", "sharegpt", 8),
            Case("others", "a100-70b", 0.3, "chat", "conversations", 9),
            Case("others", "a100-70b", 0.5, "documents", "lmsys_chat", 10),
        ),
    ),
}


def run_case(data: Path, case: Case) -> list[dict[str, Any]]:
    return list(SUITES[case.suite][0](data, case))


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table for each machine and load: tokens of the batch per second, by policy."""
    keys = list(dict.fromkeys((row["machine"], row["online"], row["seed"], round(row["load"], 2)) for row in rows))
    for key in keys:
        here = [row for row in rows if (row["machine"], row["online"], row["seed"], round(row["load"], 2)) == key]
        yield f"\n{key[0]}, {key[1]}, online load {key[3]:.0%}\n"
        yield from _runs(here) if here[0]["metric"] == "every" else _bests(here)


def standing(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield how often ours is behind the best rival by more than CLOSE, by machine and batch, and its mean over HyGen.

    The mean is over the rows in which HyGen does anything for the batch.
    """
    done: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        place = row["machine"], row["batch"], round(row["load"], 2), row["online"], row["metric"], row["tolerance"]
        done.setdefault(place, {})[row["policy"]] = row["offline_tokens_per_s"]
    behind, over = dict[tuple[str, str], list[float]](), dict[str, list[float]]()
    for (machine, batch, *_), found in done.items():
        best = max(tokens for policy, tokens in found.items() if policy not in (OURS, ORACLE))
        short = 1 - found[OURS] / best if best > 0 else 0.0
        behind.setdefault((machine, batch), []).append(short)
        if found.get("hygen", 0.0) > 0:
            over.setdefault(machine, []).append(found[OURS] / found["hygen"])
    every = [short for each in behind.values() for short in each]
    yield f"\nours is behind by more than {CLOSE:.1%} in {sum(short > CLOSE for short in every)} of {len(every)} rows:"
    for (machine, batch), shorts in behind.items():
        count = sum(short > CLOSE for short in shorts)
        yield f"  {machine}, {batch}: {count} of {len(shorts)}, by {max(0.0, max(shorts)):.1%} at most"
    for machine, ratios in over.items():
        yield f"  {machine}: {np.mean(ratios):.2f} times HyGen, {len(ratios)} rows"


def _bests(here: list[dict[str, Any]]) -> Iterator[str]:
    policies = list(dict.fromkeys(row["policy"] for row in here))
    yield f"| batch | within | {' | '.join(policies)} | total over online alone | share of the spare |"
    yield f"|---|---|{'---|' * (len(policies) + 2)}"
    for batch, metric, tolerance in dict.fromkeys((row["batch"], row["metric"], row["tolerance"]) for row in here):
        found = {
            row["policy"]: row
            for row in here
            if (row["batch"], row["metric"], row["tolerance"]) == (batch, metric, tolerance)
        }
        cells = " | ".join(
            f"{found[policy]['offline_tokens_per_s']:,.0f}" if policy in found else "" for policy in policies
        )
        ours = found[OURS]
        ratio, share = ours["total_over_online"], ours["share_of_spare"]
        yield f"| {batch} | {metric} +{tolerance:.0%} | {cells} | {ratio:.2f} | {share:.2f} |"


def _runs(here: list[dict[str, Any]]) -> Iterator[str]:
    yield "| policy | chunk | limit s | ms per token | batch tokens/s | TTFT kept | TPOT kept |"
    yield "|---|---|---|---|---|---|---|"
    for row in sorted(here, key=lambda each: (each["policy"], each["normalized_latency"])):
        limit = f"{row['limit_s']:.3f}" if row["limit_s"] else ""
        yield (
            f"| {row['policy']} | {row['chunk']} | {limit} | {1e3 * row['normalized_latency']:,.0f} "
            f"| {row['offline_tokens_per_s']:,.0f} | {row['ttft_attained']:.3f} | {row['tpot_attained']:.3f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--output", type=Path, default=Path("docs/evaluation"))
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--only", default="", help="machine, load, batch or online trace, separated by commas")
    parser.add_argument("--table", action="store_true", help="print the rows that were written before")
    options = parser.parse_args()
    path = options.output / f"colocate-{options.suite}.jsonl"
    if options.table:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        print("\n".join(table(rows)))
        if rows[0]["metric"] != "every":
            print("\n".join(standing(rows)))
        return
    options.output.mkdir(parents=True, exist_ok=True)
    wanted = {name for name in options.only.split(",") if name}
    cases = [
        case for case in SUITES[options.suite][1] if wanted <= {case.machine, str(case.load), case.batch, case.online}
    ]
    found: dict[Case, list[dict[str, Any]]] = {}
    with ProcessPoolExecutor(options.processes) as pool:
        under_way = {pool.submit(run_case, options.data, case): case for case in cases}
        for done in as_completed(under_way):
            case = under_way[done]
            found[case] = done.result()
            print(case, flush=True)
            # What is done stays, should a later case fail.
            with path.open("w") as file:
                file.writelines(json.dumps(row) + "\n" for each in cases for row in found.get(each, []))


if __name__ == "__main__":
    main()
