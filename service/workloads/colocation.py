"""Puts recorded online requests beside a batch on a simulated engine, and finds the limits of a step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_ext.coserve.slo import SloClass
from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import Clock, EngineModel
from engine_ext.errors import InputError, TooLarge
from engine_ext.plan.lengths import UNKNOWN
from engine_ext.plan.prompts import Prompts
from engine_ext.simulate.arrivals import Arrivals, at_rate
from engine_ext.simulate.colocate import OURS
from engine_ext.simulate.contest import Contest, Within, online_capacity
from engine_ext.simulate.measured import Measured
from engine_ext.simulate.traffic import Traffic
from service.errors import WorkloadError
from service.workloads.workload import Workload

METRICS = {"mean_ttft": "ttft_mean", "p99_ttft": "ttft_p99", "mean_tbt": "tbt_mean", "p99_tbt": "tbt_p99"}
BOUNDS = ("ttft", "tpot", "tbt", "percentile")
MOST_ARRIVALS = 1_000_000
MOST_LOAD = 10.0  # of the engine's capacity: more online requests than ten engines can do tell nothing new


@dataclass(frozen=True, slots=True)
class Wanted:
    """Says what online requests must keep: `slo` in seconds, `relative` against online requests alone.

    `relative`: by which share a field of `Measured` may exceed that of online requests alone.
    """

    slo: SloClass
    relative: dict[str, float]

    def within(self, base: Measured) -> Within:
        most = {name: getattr(base, name) * (1.0 + share) for name, share in self.relative.items()}
        has_bounds = any(math.isfinite(bound) for bound in self.slo.bounds)
        return Within(1.0 - self.slo.percentile if has_bounds else base.violations, most)


@dataclass(frozen=True, slots=True)
class Given:
    """Holds a workload, and the file that errors name."""

    file: Path
    workload: Workload


@dataclass(frozen=True, slots=True)
class Beside:
    """Holds online requests beside a batch, the engine's `model`, and the online load.

    `prompts` and `output` have the batch first, then one for each arrival; `caps` the batch. `load`: the online
    requests, as a share of what the engines can do of them alone.
    """

    model: EngineModel
    prompts: Prompts
    output: NDArray[np.int64]
    caps: NDArray[np.int64]
    arrivals: Arrivals
    load: float

    @property
    def traffic(self) -> Traffic:
        return Traffic.of(self.prompts, self.output, self.caps, self.arrivals)

    def contest(self, cost: CostModel, slo: SloClass) -> Contest:
        """Return the contest that finds our best settings; it runs online requests alone at once."""
        return Contest(self.traffic, cost, self.model, slo)


def parse_wanted(slo: str | None, relative: str | None) -> Wanted:
    """Read `ttft=2,tpot=0.05,percentile=0.99` and `mean_tbt=0.05`. Raises WorkloadError."""
    said = _numbers("--slo", slo, BOUNDS)
    tolerances = _numbers("--relative", relative, tuple(METRICS))
    for name, share in tolerances.items():
        if share < 0:
            raise WorkloadError(f"--relative {name}: {share:g} is below 0; 0.05 allows 5% more than online alone")
    if slo and not set(said) - {"percentile"}:
        raise WorkloadError("--slo needs at least one of ttft, tpot and tbt, in seconds: ttft=2,tpot=0.05")
    if not said and not tolerances:
        said = {"ttft": 1.0, "tpot": 0.05}
    percentile = said.pop("percentile", 0.99)
    try:
        found = SloClass("default", said.get("ttft"), said.get("tpot"), said.get("tbt"), percentile)
    except InputError as error:
        raise WorkloadError(f"--slo: {error}") from error
    return Wanted(found, {METRICS[name]: share for name, share in tolerances.items()})


def _numbers(option: str, text: str | None, names: Sequence[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in (each.strip() for each in (text or "").split(",") if each.strip()):
        name, _, value = part.partition("=")
        if name not in names:
            raise WorkloadError(f"{option}: no {name!r}; give {', '.join(names)} as name=number, separated by commas")
        if name in found:
            raise WorkloadError(f"{option}: {name} is given twice")
        try:
            found[name] = float(value)
        except ValueError as error:
            raise WorkloadError(f"{option} {name}: {value!r} is not a number") from error
        if not math.isfinite(found[name]):
            raise WorkloadError(f"{option} {name}: {value!r} is not a number of seconds or a share")
    return found


def put_beside(files: tuple[Given, Given], cost: CostModel, load: float | None, seed: int, engines: int = 1) -> Beside:
    """Put the first file's online requests beside the second one's batch. Raises WorkloadError.

    A file's requests of the other class are left out. `load`: thin or repeat the arrivals until online work is this
    share of what the engines can do of it; None leaves them as they are. Online prompts share nothing with the batch's.
    """
    model = EngineModel.of(cost, Clock.MIXED)
    (online_file, online), (offline_file, offline) = ((each.file, each.workload) for each in files)
    theirs = _of_class(online, "online", online_file)
    ours = _of_class(offline, "batch", offline_file)
    for file, workload, those in ((online_file, online, theirs), (offline_file, offline, ours)):
        _check_lengths(file, workload, those, model)
    times = online.arrives_s[theirs]
    if np.any(np.isnan(times)):
        name = online.ids[int(theirs[int(np.argmax(np.isnan(times)))])]
        raise WorkloadError(f"{online_file}: the online request {name!r} has no arrival_s")
    theirs, times = theirs[np.argsort(times, kind="stable")], np.sort(times) - times.min()
    if times[-1] <= 0:
        raise WorkloadError(f"{online_file}: all requests arrive at once; a simulation needs arrivals over some time")
    prompts, output = online.prompts.chosen(theirs), online.outputs.known[theirs]
    capacity = engines * online_capacity(prompts, np.maximum(output, 1), cost, model)
    whole_s = float(times[-1]) * len(times) / max(1, len(times) - 1)
    arrivals = Arrivals(times, np.arange(len(times)), np.zeros(len(times), dtype=np.int64), whole_s)
    if load is not None:
        if not 0 < load <= MOST_LOAD:
            raise WorkloadError(f"--load must be above 0 and at most {MOST_LOAD:g}, not {load:g}")
        count = load * capacity * whole_s
        if count > MOST_ARRIVALS:
            raise WorkloadError(
                f"--load {load:g} would take {count:,.0f} online requests, and {MOST_ARRIVALS:,} are the most; give a "
                f"part of {online_file}, which lasts {whole_s:,.0f} s"
            )
        arrivals = at_rate(times, load * capacity, whole_s, np.random.default_rng(seed))
        if len(arrivals) == 0:
            raise WorkloadError(f"--load {load:g} leaves no request of {online_file}; give a longer file or more load")
    everything = _together(offline.prompts.chosen(ours), prompts, arrivals)
    outputs = np.maximum(np.concatenate([offline.outputs.known[ours], output[arrivals.number]]), 1)
    return Beside(model, everything, outputs, offline.outputs.caps[ours], arrivals, arrivals.rate / capacity)


def _of_class(workload: Workload, kind: str, file: Path) -> NDArray[np.int64]:
    """Return the places of the requests of one class; those without a class are of the class that was asked for."""
    found = np.flatnonzero([each in (kind, None) for each in workload.classes])
    if len(found) == 0:
        raise WorkloadError(f'{file} has no requests of the class "{kind}"')
    return found


def _check_lengths(file: Path, workload: Workload, those: NDArray[np.int64], model: EngineModel) -> None:
    known = workload.outputs.known[those]
    if np.any(known == UNKNOWN):
        name = workload.ids[int(those[int(np.argmax(known == UNKNOWN))])]
        raise WorkloadError(f"{file}: a simulation needs the output length of every request; {name!r} has none")
    needed = workload.prompts.lengths[those] + known
    if int(needed.max()) >= model.capacity:
        worst = int(needed.argmax())
        error = TooLarge(worst, int(needed[worst]), model.capacity)
        raise WorkloadError(f"{file}: {workload.ids[int(those[worst])]!r}: {error}")


def _together(batch: Prompts, online: Prompts, arrivals: Arrivals) -> Prompts:
    """Return the batch's prompts and then one for each arrival; what comes from another file or copy is unlike."""
    arriving = online.chosen(arrivals.number)
    own = int(online.tokens.max(initial=0)) + 1
    base = int(batch.tokens.max(initial=0)) + 1
    copies = np.repeat(arrivals.copy, np.diff(arriving.starts))
    tokens = arriving.tokens.astype(np.int64) + base + own * copies
    _, renamed = np.unique(np.concatenate([batch.tokens.astype(np.int64), tokens]), return_inverse=True)
    sizes = None
    if batch.sizes is not None or arriving.sizes is not None:
        sizes = np.concatenate([_sizes(batch), _sizes(arriving)])
    starts = np.concatenate([batch.starts, batch.starts[-1] + arriving.starts[1:]])
    return Prompts(renamed.astype(np.uint32), starts, sizes)


def _sizes(prompts: Prompts) -> NDArray[np.int64]:
    return np.ones(len(prompts.tokens), dtype=np.int64) if prompts.sizes is None else prompts.sizes


def alone_line(contest: Contest, load: float) -> str:
    """Say what online requests get alone. `load`: the share of what the engine can do of them."""
    base = contest.base
    return (
        f"{len(contest.traffic.arrivals):,} online requests, {load:.0%} of what can be done of them; "
        f"alone: TTFT {base.ttft_mean:.3f} s (P99 {base.ttft_p99:.3f}), TBT {base.tbt_mean:.4f} s "
        f"(P99 {base.tbt_p99:.4f}), {base.violations:.1%} outside the SLO"
    )


def profile(contest: Contest, wanted: Wanted) -> dict[str, Any]:
    """Return the limits of a step with which ours does most for the batch. Raises WorkloadError if none keeps them."""
    best = contest.best(OURS, wanted.within(contest.base))
    if best is None:
        raise WorkloadError(
            "no limit of a step keeps these bounds: online requests alone are too close to them; allow more, or lower "
            "the load"
        )
    limits = best.settings.profiled._asdict()
    slo = contest.slo
    bounds = {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s, "tbt_s": slo.tbt_s, "percentile": slo.percentile}
    return {
        "slo": {name: value for name, value in bounds.items() if value is not None},
        "profiled": {
            "prompt_tokens": best.settings.chunk,
            **{name: value for name, value in limits.items() if math.isfinite(value)},
        },
    }
