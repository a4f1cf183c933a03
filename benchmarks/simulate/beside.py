"""Says which schedulers there are for online requests beside a batch on one engine, ours among them, and runs them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from benchmarks.simulate.bros import new_packing, run_bros
from benchmarks.simulate.rivals import Rival, run_rival
from engine_ext.arrays import Column, column
from engine_ext.coserve.predictor import new_predictor
from engine_ext.coserve.slo import SloClass
from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import EngineModel
from engine_ext.errors import InputError
from engine_ext.simulate import colocate
from engine_ext.simulate.cache import Cache
from engine_ext.simulate.colocate import ALONE, OURS, fresh_engine, run_scan
from engine_ext.simulate.contest import PLACES, Choices, Grid, Policy
from engine_ext.simulate.contest import POLICIES as OWN
from engine_ext.simulate.line import new_line
from engine_ext.simulate.measured import NO_LIMIT, Measured, Played, Settings, measured
from engine_ext.simulate.ours import AHEAD_S
from engine_ext.simulate.shared_engine import SharedEngine
from engine_ext.simulate.traffic import Traffic

RESERVED = (1.0, 0.3)  # SGLang's new token ratio
RATES = np.geomspace(0.05, 50.0, PLACES)  # requests of the batch per second


@dataclass(frozen=True, slots=True)
class Rule:
    """Says what makes a rival; see `Rival`. `depth_first`: in which order it takes the batch."""

    depth_first: bool = False
    online_first: bool = True
    counts_decodes: bool = False
    reserves: bool = False
    preempts: bool = True
    keeps: bool = False
    limited: bool = False
    idle_is_free: bool = False
    rated: bool = False
    chunk_first: bool = False
    alternates: bool = False


BROS = "bros"
ORACLE = "oracle"  # ours, which knows every answer's length, and what online requests will hold in a second
RIVALS: Mapping[str, Rule] = MappingProxyType(
    {
        "fcfs": Rule(online_first=False, counts_decodes=True, reserves=True, preempts=False, chunk_first=True),
        "priority": Rule(counts_decodes=True, reserves=True, preempts=False, chunk_first=True),
        "vllm-priority": Rule(counts_decodes=True),
        "sarathi-offline": Rule(counts_decodes=True, keeps=True),
        "round-robin": Rule(counts_decodes=True, preempts=False, alternates=True),
        "hygen-star": Rule(counts_decodes=True, keeps=True, rated=True),
        "hygen": Rule(limited=True, keeps=True, depth_first=True),
        "hygen-recompute": Rule(limited=True, depth_first=True),
        "hygen-idle": Rule(limited=True, keeps=True, depth_first=True, idle_is_free=True),
    }
)


def run(
    traffic: Traffic, cost: CostModel, model: EngineModel, policy: str, settings: Settings, slo: SloClass
) -> Measured:
    """Run one policy. Raises InputError for an unknown one, TooLarge for a request that no cache can hold."""
    return measured(policy, settings, [play(traffic, cost, model, policy, settings, slo)], slo, cost)


def play(
    traffic: Traffic, cost: CostModel, model: EngineModel, policy: str, settings: Settings, slo: SloClass
) -> Played:
    """Run one policy on an engine of its own. Raises InputError, TooLarge as `run` does."""
    engine, cache = fresh_engine(traffic, model)
    run_on(engine, cache, traffic, cost, model, policy, settings, slo)
    return Played(traffic, (engine,))


def run_on(
    engine: SharedEngine,
    cache: Cache,
    traffic: Traffic,
    cost: CostModel,
    model: EngineModel,
    policy: str,
    settings: Settings,
    slo: SloClass,
) -> None:
    """Run one policy on this engine. Raises InputError for an unknown one."""
    if policy in (OURS, ORACLE):
        known_kv = _known_kv(traffic, cost, model) if policy == ORACLE else None
        run_scan(engine, cache, traffic, cost, model, settings, slo, known_kv)
    elif policy == ALONE:
        run_scan(engine, cache, traffic, cost, model, settings, SloClass(), has_batch=False)
    elif policy == BROS:
        _run_bros(traffic, model, engine, cache, settings, slo)
    elif policy in RIVALS:
        _run_rival(traffic, model, engine, cache, RIVALS[policy], settings)
    else:
        raise InputError(f"no policy {policy!r}; choose from {', '.join(POLICIES)}")


def _run_rival(
    traffic: Traffic, model: EngineModel, engine: SharedEngine, cache: Cache, rule: Rule, settings: Settings
) -> None:
    order = traffic.tree.order if rule.depth_first else np.arange(traffic.batch, dtype=np.int64)
    line = new_line(order, len(traffic.output))
    reserved = float(settings.reserved if rule.reserves else 0.0)
    rival = Rival(
        bool(rule.online_first),
        int(settings.chunk),
        bool(rule.counts_decodes),
        reserved,
        bool(rule.preempts),
        bool(rule.keeps),
        float(settings.profiled.limit_s if rule.limited else NO_LIMIT),
        bool(rule.idle_is_free),
        float(settings.rate if rule.rated else 1e12),
        int(traffic.group),
        bool(rule.chunk_first),
        bool(rule.alternates),
        np.full(1, reserved),
    )
    until_s = float(traffic.arrivals.duration_s)
    run_rival(engine, cache, new_predictor(model.numbers), line, rival, traffic.batch, until_s)


def _run_bros(
    traffic: Traffic, model: EngineModel, engine: SharedEngine, cache: Cache, settings: Settings, slo: SloClass
) -> None:
    line = new_line(np.arange(traffic.batch, dtype=np.int64), len(traffic.output))
    packing = new_packing(slo.bounds, int(settings.chunk), int(traffic.group))
    until_s = float(traffic.arrivals.duration_s)
    run_bros(engine, cache, new_predictor(model.numbers), line, packing, traffic.batch, until_s)


def _known_kv(traffic: Traffic, cost: CostModel, model: EngineModel) -> Column:
    """Return what online requests alone will hold at most within a second, by steps of AHEAD_S."""
    (engine,) = colocate.play_alone(traffic, cost, model, Settings()).engines
    online = slice(traffic.batch, None)
    begins = (column(engine.requests, "arrives_s")[online] / AHEAD_S).astype(np.int64)
    ends = (column(engine.requests, "last_s")[online] / AHEAD_S).astype(np.int64) + 1
    kv = (traffic.lengths + traffic.output)[online]
    change = np.zeros(int(ends.max(initial=0)) + 2, dtype=np.int64)
    np.add.at(change, begins, kv)
    np.add.at(change, ends, -kv)
    second = round(1.0 / AHEAD_S)
    return sliding_window_view(np.pad(np.cumsum(change), (0, second - 1)), second).max(axis=1)


def _limited(grid: Grid) -> Choices:
    return Choices(tuple(grid.limits(chunk) for chunk in grid.chunks))


def _rated(grid: Grid) -> Choices:
    return Choices(tuple([Settings(chunk=chunk, rate=float(rate)) for rate in RATES] for chunk in grid.chunks))


def _reserving(grid: Grid) -> Choices:
    settings = (Settings(chunk=chunk, reserved=reserved) for chunk in grid.sizes for reserved in RESERVED)
    return Choices(tried=tuple(settings))


def _policy(name: str) -> Policy:
    """Return how a rival or the oracle runs, and what it can be set to."""

    def play_it(traffic: Traffic, cost: CostModel, model: EngineModel, settings: Settings, slo: SloClass) -> Measured:
        return run(traffic, cost, model, name, settings, slo)

    if name == ORACLE:  # it may ignore what it knows, so our runs are its runs too
        return replace(OWN[OURS], run=play_it, includes=OURS)
    rule = RIVALS.get(name, Rule())
    if rule.limited:
        return Policy(play_it, _limited)
    if rule.rated:
        return Policy(play_it, _rated)
    return Policy(play_it, _reserving) if name == "priority" else Policy(play_it)


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {ALONE: OWN[ALONE], **{name: _policy(name) for name in (*RIVALS, BROS, ORACLE)}, OURS: OWN[OURS]}
)
