"""Finds the settings with which each policy does most for a batch while online requests keep their bounds.

A policy with one knob, such as a limit of a step, is set by bisection from gentle to harsh; one with few settings tries
them all. Every policy is judged on the same traffic and the same engine, and against online requests alone.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from engine_ext.arrays import Column
from engine_ext.coserve.harvest import riding_tokens
from engine_ext.coserve.limit import PAGE, Profiled
from engine_ext.coserve.slo import SloClass
from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import EngineModel
from engine_ext.plan.prompts import Prompts
from engine_ext.simulate.arrivals import Arrivals
from engine_ext.simulate.colocate import ORACLE, OURS, run
from engine_ext.simulate.measured import Measured, Settings
from engine_ext.simulate.pair import POOLED, Pair, run_pair
from engine_ext.simulate.traffic import Traffic

CHUNKS = (256, 512, 1024, 2048)
CHUNK_UNIT = 64  # tokens of which that chunk size is a multiple
RESERVED = (1.0, 0.3)  # SGLang's new token ratio
PLACES = 48  # of a knob
EXCESS = np.geomspace(0.01, 20.0, PLACES)  # of a limit over the mean TBT of online alone, as a share of it
PRICES = np.geomspace(0.02, 20.0, PLACES)  # times the same TBT
RATES = np.geomspace(0.05, 50.0, PLACES)  # requests of the batch per second
DECODING = np.unique(np.geomspace(8, 2048, PLACES).astype(int))  # requests of a strict engine's step
ENDLESS_S = 1e6
FIELDS = (
    *("suite", "load", "offline", "policy", "online_tokens_per_s", "offline_tokens_per_s", "total_over_online"),
    *("share_of_spare", "ttft_mean", "ttft_p99", "tbt_mean", "tbt_p99", "normalized_latency", "ttft_attained"),
    *("tpot_attained", "violations", "preemptions", "recomputed_tokens", "restored_tokens", "limit_s"),
)


@dataclass(frozen=True, slots=True)
class Within:
    """Says what a run must keep.

    `violations`: the largest share of online requests that may miss the class's bounds; where online requests alone
    miss them more often, as often as they. `most`: the largest value of fields of `Measured`, in seconds.
    """

    violations: float = 0.0
    most: Mapping[str, float] = field(default_factory=dict[str, float])

    def is_kept(self, found: Measured, base: Measured) -> bool:
        in_time = found.violations <= max(self.violations, base.violations)
        return in_time and all(getattr(found, name) <= value for name, value in self.most.items())


@dataclass(eq=False)
class Contest:
    """Runs policies on one traffic, and remembers what each setting gave.

    `base`: the run of online requests alone, with the chunk size that suits them best.
    """

    traffic: Traffic | Pair
    cost: CostModel
    model: EngineModel
    slo: SloClass
    runs: dict[tuple[str, Settings], Measured] = field(default_factory=dict[tuple[str, Settings], Measured])
    base: Measured = field(init=False)

    def __post_init__(self) -> None:
        alone = [self.measure("online-only", Settings(chunk=chunk)) for chunk in self.chunks]
        self.base = min(alone, key=lambda found: (found.violations, found.normalized_latency))

    def measure(self, policy: str, settings: Settings) -> Measured:
        """Run a policy, or return what it gave before. Raises InputError, TooLarge."""
        if (policy, settings) not in self.runs:
            self.runs[policy, settings] = run_on_engines(
                self.traffic, self.cost, self.model, policy, settings, self.slo
            )
        return self.runs[policy, settings]

    def best(self, policy: str, within: Within) -> Measured | None:
        """Return the run that does most for the batch among those that keep the bounds; None if none does.

        The oracle may ignore what it knows, so our runs are its runs too.
        """
        if policy == ORACLE:
            self.best(OURS, within)
        knobs, settings = _choices(policy, self._knob_chunks if within.most else self.chunks, self.chunks, self.base)
        for each in settings:
            self.measure(policy, each)
        is_easy = policy in (OURS, ORACLE) and not within.most and self._kept(policy, within)
        for knob in () if is_easy else knobs:  # bounds in seconds are what slack is for: no limit need be found
            self._bisect(policy, knob, within)
        return max(self._kept(policy, within), key=lambda found: found.offline_tokens_per_s, default=None)

    @property
    def chunks(self) -> tuple[int, ...]:
        """The chunk sizes to try: CHUNKS, and before them what hides its GEMM behind reading the weights, if smaller.

        With that one, a step with prompts takes hardly longer than one without. An engine has room for PAGE in any.
        """
        hidden = int(riding_tokens(self.model.numbers, 0)) // CHUNK_UNIT * CHUNK_UNIT
        return (hidden, *CHUNKS) if PAGE <= hidden < min(CHUNKS) else CHUNKS

    @property
    def _knob_chunks(self) -> tuple[int, ...]:
        """The chunk sizes with which knobs are tried under bounds against online alone: the base's and the next one.

        A still larger chunk delays every token more than such bounds allow, unless a limit cuts it down again.
        """
        place = self.chunks.index(self.base.settings.chunk)
        return self.chunks[place : place + 2]

    def _kept(self, policy: str, within: Within) -> list[Measured]:
        names = (OURS, ORACLE) if policy == ORACLE else (policy,)
        return [found for (name, _), found in self.runs.items() if name in names and within.is_kept(found, self.base)]

    def _bisect(self, policy: str, knob: list[Settings], within: Within) -> None:
        """Look for the harshest setting that keeps the bounds; what is tried on the way is remembered."""
        gentle, harsh = -1, len(knob)
        known = [place for place, settings in enumerate(knob) if (policy, settings) in self.runs]
        for place in known:  # what was tried for other bounds narrows the search for these
            if within.is_kept(self.runs[policy, knob[place]], self.base):
                gentle = place
        harsh = min([place for place in known if place > gentle], default=harsh)
        while harsh - gentle > 1:
            place = (gentle + harsh) // 2
            if within.is_kept(self.measure(policy, knob[place]), self.base):
                gentle = place
            else:
                harsh = place


def _choices(
    policy: str, chunks: tuple[int, ...], sizes: tuple[int, ...], base: Measured
) -> tuple[list[list[Settings]], list[Settings]]:
    """Return a policy's knobs, each a list of settings from gentle to harsh, and the settings that are just tried.

    `chunks`: chunk sizes of each knob; `sizes`: those of a policy without one.
    """
    limits = [(1.0 + float(excess)) * base.tbt_mean for excess in EXCESS]
    prices = [float(price) * base.tbt_mean for price in PRICES]
    knobs, tried = list[list[Settings]](), list[Settings]()
    for chunk in chunks:
        plain = Settings(chunk=chunk)
        by_limit = [replace(plain, profiled=Profiled(limit_s)) for limit_s in limits]
        if policy in ("hygen", "hygen-recompute", "hygen-idle"):
            knobs.append(by_limit)
        elif policy == "hygen-star":
            knobs.append([replace(plain, rate=float(rate)) for rate in RATES])
        elif policy in POOLED:
            knobs += _of_pools(policy, chunk, by_limit)
        elif policy in (OURS, ORACLE):
            tried.append(plain)
            for alone in (False, True):
                knobs.append([replace(plain, profiled=Profiled(limit_s, prompts_alone=alone)) for limit_s in limits])
                knobs.append(
                    [replace(plain, profiled=Profiled(price_s=price_s, prompts_alone=alone)) for price_s in prices]
                )
    if policy == "priority":
        tried += [Settings(chunk=chunk, reserved=reserved) for chunk in sizes for reserved in RESERVED]
    elif not knobs:
        tried += [Settings(chunk=chunk) for chunk in sizes]
    return knobs, tried


def _of_pools(policy: str, chunk: int, by_limit: list[Settings]) -> list[list[Settings]]:
    """Return the knobs of a policy for pools, with each part of the answers that may be reserved."""
    for_all = [Settings(chunk=chunk, reserved=reserved) for reserved in RESERVED]
    if policy == "ooco":
        return [[replace(each, reserved=plain.reserved) for each in by_limit] for plain in for_all]
    if policy == "online-priority":
        return [[replace(plain, most_decoding=float(most)) for most in DECODING] for plain in for_all]
    return [[replace(plain, rate=float(rate)) for rate in RATES] for plain in for_all]


def online_capacity(prompts: Prompts, output: Column, cost: CostModel, model: EngineModel) -> float:
    """Return how many such requests per second the engine can do alone: all of them come at once."""
    count = len(output)
    at_once = Arrivals(np.zeros(count), np.arange(count), np.zeros(count, dtype=np.int64), ENDLESS_S)
    traffic = Traffic.of(prompts, output, np.zeros(0, dtype=np.int64), at_once)
    found = (run(traffic, cost, model, "online-only", Settings(chunk=chunk), SloClass()) for chunk in CHUNKS)
    return count / min(each.ended_s for each in found)


def batch_alone(traffic: Traffic | Pair, cost: CostModel, model: EngineModel) -> Measured:
    """Return our run of the batch with no online request."""
    return run_on_engines(traffic.without_online(), cost, model, OURS, Settings(chunk=max(CHUNKS)), SloClass())


def run_on_engines(
    traffic: Traffic | Pair, cost: CostModel, model: EngineModel, policy: str, settings: Settings, slo: SloClass
) -> Measured:
    """Run one policy on an engine, or on two for a pair. Raises InputError, TooLarge."""
    if isinstance(traffic, Pair):
        return run_pair(traffic, cost, model, policy, settings, slo)
    return run(traffic, cost, model, policy, settings, slo)


def row_of(
    suite: str, load: float, offline: str, base: Measured, best: Measured | None, policy: str, alone: Measured
) -> dict[str, Any]:
    """Return FIELDS of a policy's best run; nothing is done for the batch if no run keeps the bounds.

    `load`: the share of what the engine can do of the online work. `alone`: the batch without online requests.
    """
    found = replace(base, offline_tokens_per_s=0.0) if best is None else best
    limit_s = found.settings.profiled.limit_s
    spare = alone.offline_tokens_per_s * max(0.0, 1.0 - load)
    known: dict[str, Any] = {
        "suite": suite,
        "load": load,
        "offline": offline,
        "policy": policy,
        "total_over_online": _ratio(base.online_tokens_per_s + found.offline_tokens_per_s, base.online_tokens_per_s),
        "share_of_spare": _ratio(found.offline_tokens_per_s, spare),
        "limit_s": limit_s if math.isfinite(limit_s) else None,
    }
    return {name: known[name] if name in known else getattr(found, name) for name in FIELDS}


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
