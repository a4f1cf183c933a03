"""Runs policies on two engines: in pools with different tasks, or side by side with half of the requests each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from benchmarks.simulate.beside import POLICIES, RATES, RESERVED, play
from benchmarks.simulate.pools import Pooling, Pools, run_pools
from benchmarks.simulate.rivals import Rival
from engine_ext.arrays import Column
from engine_ext.coserve.predictor import new_predictor
from engine_ext.coserve.slo import SloClass
from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import EngineModel
from engine_ext.plan.prompts import Prompts
from engine_ext.simulate.arrivals import Arrivals
from engine_ext.simulate.cache import Cache
from engine_ext.simulate.colocate import OURS, fresh_engine
from engine_ext.simulate.contest import PLACES, Choices, Grid, Policy
from engine_ext.simulate.line import new_line
from engine_ext.simulate.measured import Measured, Played, Settings, measured
from engine_ext.simulate.traffic import Traffic

DECODING = np.unique(np.geomspace(8, 2048, PLACES).astype(int))  # requests of a strict engine's step
BYTES_PER_S = 50e9  # of a link between two engines: 400 Gbit/s


@dataclass(frozen=True, slots=True)
class Pair:
    """Holds the traffic of two engines: `whole` for pools, and the half of each where they do the same.

    Requests go to the engines in turn, online ones by arrival.
    """

    whole: Traffic
    halves: tuple[Traffic, Traffic]

    @classmethod
    def of(cls, prompts: Prompts, output: Column, caps: Column, arrivals: Arrivals) -> "Pair":
        """Divide the requests; see `Traffic.of`."""
        first, second = (_half(prompts, output, caps, arrivals, which) for which in range(2))
        return cls(Traffic.of(prompts, output, caps, arrivals), (first, second))

    @property
    def batch(self) -> int:
        return self.whole.batch

    @property
    def lengths(self) -> Column:
        return self.whole.lengths

    @property
    def output(self) -> Column:
        return self.whole.output

    @property
    def arrivals(self) -> Arrivals:
        return self.whole.arrivals

    def without_online(self) -> "Pair":
        first, second = (half.without_online() for half in self.halves)
        return Pair(self.whole.without_online(), (first, second))


def _half(prompts: Prompts, output: Column, caps: Column, arrivals: Arrivals, which: int) -> Traffic:
    ours = np.arange(which, len(caps), 2)
    theirs = np.arange(which, len(arrivals), 2)
    those = np.concatenate([ours, len(caps) + theirs])
    some = replace(
        arrivals,
        arrives_s=arrivals.arrives_s[theirs],
        number=arrivals.number[theirs],
        copy=arrivals.copy[theirs],
    )
    return Traffic.of(prompts.chosen(those), output[those], caps[ours], some)


def run_pair(
    pair: Pair, cost: CostModel, model: EngineModel, policy: str, settings: Settings, slo: SloClass
) -> Measured:
    """Run one policy on two engines of this model. Raises InputError, TooLarge as `run` does."""
    if policy in POOLED:
        played = [play_pools(pair.whole, cost, model, POOLED[policy], settings)[0]]
    else:
        played = [play(half, cost, model, policy, settings, slo) for half in pair.halves]
    return measured(policy, settings, played, slo, cost)


def play_pools(
    traffic: Traffic, cost: CostModel, model: EngineModel, rule: "PoolRule", settings: Settings
) -> tuple[Played, tuple[Cache, Cache]]:
    """Run a policy on two engines in pools; return what it did, and the caches. Raises TooLarge."""
    relaxed, relaxed_cache = fresh_engine(traffic, model)
    strict, strict_cache = fresh_engine(traffic, model)
    strict = strict._replace(requests=relaxed.requests)
    ready_s, saturated = np.zeros(len(traffic.output)), int(model.weights_s / model.gemm_s)
    pools = Pools(relaxed, relaxed_cache, strict, strict_cache, ready_s, saturated)
    reserved = float(settings.reserved if rule.pulls else 0.0)
    prompts = Rival(
        online_first=bool(rule.online_first),
        chunk=int(settings.chunk),
        counts_decodes=False,
        reserved=reserved,
        preempts=bool(rule.online_first),
        keeps=False,
        limit_s=float(0.0 if rule.online_first else np.inf),  # for the batch beside online prompts
        idle_is_free=True,
        rate=float(min(settings.rate, 1e12)),
        group=0,
        chunk_first=False,
        alternates=False,
        ratio=np.full(1, reserved),
    )
    rules = Pooling(
        prompts,
        reserved=float(settings.reserved),
        most=int(min(settings.most_decoding, 1 << 40)),
        limit_s=float(settings.profiled.limit_s if rule.pulls else np.inf),
        pulls=bool(rule.pulls),
        token_s=float(cost.kv_bytes_per_token / BYTES_PER_S),
    )
    order = np.arange(traffic.batch if rule.batch else 0, dtype=np.int64)
    line, until_s = new_line(order, len(traffic.output)), float(traffic.arrivals.duration_s)
    run_pools(pools, new_predictor(model.numbers), line, rules, traffic.batch, until_s)
    return Played(traffic, (relaxed, strict)), (relaxed_cache, strict_cache)


@dataclass(frozen=True, slots=True)
class PoolRule:
    """Says what makes a policy for pools; see `Pooling`. `batch`: whether it runs the batch at all."""

    batch: bool = True
    online_first: bool = True
    pulls: bool = False


ONLINE_PD = "online-pd"  # online requests alone on the two pools
POOLED: Mapping[str, PoolRule] = MappingProxyType(
    {
        ONLINE_PD: PoolRule(batch=False),
        "base-pd": PoolRule(online_first=False),
        "online-priority": PoolRule(),
        "ooco": PoolRule(pulls=True),
    }
)
PAIR_POLICIES = (*POOLED, OURS)


def _choices(policy: str) -> Callable[[Grid], Choices]:
    """Return the knobs of a policy for pools, with each part of the answers that may be reserved."""

    def choices(grid: Grid) -> Choices:
        return Choices(
            tuple(
                knob
                for chunk in grid.chunks
                for knob in _knobs(policy, [Settings(chunk=chunk, reserved=part) for part in RESERVED], grid)
            )
        )

    return choices


def _knobs(policy: str, plain: list[Settings], grid: Grid) -> list[list[Settings]]:
    if policy == "ooco":
        limits = grid.limits(plain[0].chunk)
        return [[replace(each, reserved=some.reserved) for each in limits] for some in plain]
    if policy == "online-priority":
        return [[replace(each, most_decoding=float(most)) for most in DECODING] for each in plain]
    return [[replace(each, rate=float(rate)) for rate in RATES] for each in plain]


def _policy(name: str) -> Policy:
    """Return how a policy runs on a pair; those for one engine do as they do on one, side by side."""

    def play_it(pair: Pair, cost: CostModel, model: EngineModel, settings: Settings, slo: SloClass) -> Measured:
        return run_pair(pair, cost, model, name, settings, slo)

    return Policy(play_it, _choices(name)) if name in POOLED else replace(POLICIES[name], run=play_it)


ON_PAIRS: Mapping[str, Policy] = MappingProxyType({name: _policy(name) for name in (*POOLED, *POLICIES)})
