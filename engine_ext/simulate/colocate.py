"""Runs the policies for online requests beside a batch, each on the same engine, and measures both sides."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from engine_ext.arrays import Column, column
from engine_ext.coserve.governor import new_governor
from engine_ext.coserve.predictor import new_predictor
from engine_ext.coserve.reserve import new_online_kv
from engine_ext.coserve.slo import SloClass
from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import Clock, EngineModel, StepModel
from engine_ext.errors import InputError, TooLarge
from engine_ext.plan.groups import group_requests
from engine_ext.plan.lengths import UNKNOWN
from engine_ext.scan.footprint import output_tokens
from engine_ext.scan.replan import Progress, answers_before_next, plan_backlog
from engine_ext.scan.state import State, StepCosts
from engine_ext.simulate.bros import new_packing, run_bros
from engine_ext.simulate.cache import Cache, new_cache
from engine_ext.simulate.coserving import AHEAD_S, Ours, Rules, progress_of, run_ours
from engine_ext.simulate.line import new_line
from engine_ext.simulate.measured import NO_LIMIT, Measured, Played, Settings, measured
from engine_ext.simulate.rivals import Rival, run_rival
from engine_ext.simulate.shared_engine import SharedEngine, new_shared_engine
from engine_ext.simulate.traffic import Traffic


def run(
    traffic: Traffic, cost: CostModel, model: EngineModel, policy: str, settings: Settings, slo: SloClass
) -> Measured:
    """Run one policy. Raises InputError for an unknown one, TooLarge for a request that no cache can hold."""
    return measured(policy, settings, [play(traffic, cost, model, policy, settings, slo)], slo, cost)


def play(
    traffic: Traffic, cost: CostModel, model: EngineModel, policy: str, settings: Settings, slo: SloClass
) -> Played:
    """Run one policy on an engine of its own. Raises InputError, TooLarge as `run` does."""
    check_lengths(traffic, model)
    engine, cache = fresh_engine(traffic, model)
    run_on(engine, cache, traffic, cost, model, policy, settings, slo)
    return Played(traffic, (engine,))


def check_lengths(traffic: Traffic, model: EngineModel) -> None:
    """Raise TooLarge for a request that the KV cache cannot hold."""
    needed = traffic.lengths + traffic.output
    if len(needed) and int(needed.max()) >= model.capacity:
        raise TooLarge(int(needed.argmax()), int(needed.max()), model.capacity)


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
        _run_scan(traffic, cost, model, engine, cache, settings, slo, policy == ORACLE)
    elif policy == BROS:
        _run_bros(traffic, model, engine, cache, settings, slo)
    elif policy in RIVALS:
        _run_rival(traffic, model, engine, cache, RIVALS[policy], settings)
    else:
        raise InputError(f"no policy {policy!r}; choose from {', '.join(POLICIES)}")


def fresh_engine(traffic: Traffic, model: EngineModel) -> tuple[SharedEngine, Cache]:
    """Return an engine and an empty cache as they are before anything has arrived."""
    tree = traffic.everything
    leaf = np.empty(len(traffic.output), dtype=np.int64)
    leaf[tree.order] = tree.leaves
    online = np.arange(len(traffic.output)) >= traffic.batch
    arrives_s = np.zeros(len(traffic.output))
    arrives_s[traffic.batch :] = traffic.arrivals.arrives_s
    engine = new_shared_engine(leaf, traffic.lengths, traffic.output, online, arrives_s)
    return engine, new_cache(tree.parent, tree.begin, tree.end, model.capacity)


def _run_rival(
    traffic: Traffic, model: EngineModel, engine: SharedEngine, cache: Cache, rule: "Rule", settings: Settings
) -> None:
    order = traffic.tree.order if rule.depth_first else np.arange(traffic.batch, dtype=np.int64)
    line = new_line(order if rule.batch else np.zeros(0, dtype=np.int64), len(traffic.output))
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


def _run_scan(
    traffic: Traffic,
    cost: CostModel,
    model: EngineModel,
    engine: SharedEngine,
    cache: Cache,
    settings: Settings,
    slo: SloClass,
    knows: bool,
) -> None:
    """Run the dual scan; `knows`: it is told what nobody can know, to see what not knowing costs."""
    costs = StepCosts(
        model.gemm_s,
        model.read_s,
        model.weights_s,
        model.capacity,
        quadratic_s=model.quadratic_s,
        bursts=model.clock is Clock.SEQUENTIAL,
    )
    count, generator = traffic.batch, np.random.default_rng(settings.seed)
    line = new_line(np.arange(count, dtype=np.int64), len(traffic.output))
    ours = _ours(traffic, model.numbers, _ahead(traffic, model) if knows else np.zeros(0, dtype=np.int64))
    rules = Rules(slo.bounds, slo.percentile, settings.profiled.numbers(), int(settings.chunk), model.numbers)
    groups = group_requests(traffic.tree, None)
    known = traffic.output[:count] if knows else np.full(count, UNKNOWN)
    released = traffic.group or count
    progress = Progress.at_first(traffic.caps, known.copy(), np.zeros(count, dtype=np.bool_))
    while True:
        hidden = np.arange(count) >= released
        # As if ended and of known length, so that nothing is learned from those that are not there yet.
        progress = replace(progress, ended=progress.ended | hidden, known=np.where(hidden, 0, known))
        plan = plan_backlog(traffic.tree, groups, progress, cost, costs, generator)
        answers = answers_before_next(progress.learned)
        until_s = float(traffic.arrivals.duration_s)
        if run_ours(engine, cache, plan.state, line, ours, rules, answers, released < count, until_s):
            return
        progress = _go_on(progress, engine, plan.state)
        if np.all(progress.ended[:released]):
            released += traffic.group


def _ahead(traffic: Traffic, model: EngineModel) -> Column:
    """Return what online requests alone will hold at most within a second, by steps of AHEAD_S."""
    engine, cache = fresh_engine(traffic, model)
    _run_rival(traffic, model, engine, cache, RIVALS["online-only"], Settings())
    online = slice(traffic.batch, None)
    begins = (column(engine.requests, "arrives_s")[online] / AHEAD_S).astype(np.int64)
    ends = (column(engine.requests, "last_s")[online] / AHEAD_S).astype(np.int64) + 1
    kv = (traffic.lengths + traffic.output)[online]
    change = np.zeros(int(ends.max(initial=0)) + 2, dtype=np.int64)
    np.add.at(change, begins, kv)
    np.add.at(change, ends, -kv)
    second = round(1.0 / AHEAD_S)
    return sliding_window_view(np.pad(np.cumsum(change), (0, second - 1)), second).max(axis=1)


def _ours(traffic: Traffic, numbers: StepModel, ahead: Column) -> Ours:
    def places() -> Column:
        return np.zeros(len(traffic.output), dtype=np.int64)

    rests = np.zeros(len(traffic.output), dtype=np.bool_)
    held, decoded = new_online_kv(numbers.capacity), np.zeros(1, dtype=np.int64)
    arrived, first = np.zeros((2, len(traffic.output)))
    return Ours(
        new_predictor(numbers),
        new_governor(),
        held,
        places(),
        places(),
        places(),
        rests,
        decoded,
        arrived,
        first,
        ahead,
    )


def _go_on(progress: Progress, engine: SharedEngine, state: State) -> Progress:
    count = len(progress.caps)
    tokens, runs, prefilled, ended = progress_of(engine, count)
    running = np.flatnonzero(runs)
    tokens[running] = output_tokens(state, running)
    return replace(
        progress,
        tokens=tokens,
        runs=runs,
        prefilled=prefilled,
        ended=ended,
        fresh=column(state.requests, "fresh").astype(np.int64),
        side=column(state.requests, "side").astype(np.int64),
    )


@dataclass(frozen=True, slots=True)
class Rule:
    """Says what makes a rival; see `Rival`.

    `batch`: whether it runs the batch at all; `depth_first`: in which order.
    """

    batch: bool = True
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
OURS = "batchweave"
ORACLE = "oracle"  # ours, which knows every answer's length, and what online requests will hold in a second
RIVALS: Mapping[str, Rule] = MappingProxyType(
    {
        "online-only": Rule(batch=False),
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
POLICIES = (*RIVALS, BROS, ORACLE, OURS)
