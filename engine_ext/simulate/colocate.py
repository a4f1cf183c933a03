"""Runs our scheduler for online requests beside a batch on a simulated engine, and measures both sides."""

from dataclasses import replace

import numpy as np

from engine_ext.arrays import Column, column
from engine_ext.coserve.slo import SloClass
from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import Clock, EngineModel, StepModel
from engine_ext.errors import TooLarge
from engine_ext.plan.groups import group_requests
from engine_ext.plan.lengths import UNKNOWN
from engine_ext.scan.footprint import output_tokens
from engine_ext.scan.replan import Progress, answers_before_next, plan_backlog
from engine_ext.scan.state import State, StepCosts
from engine_ext.simulate.cache import Cache, new_cache
from engine_ext.simulate.coserving import progress_of, run_ours
from engine_ext.simulate.line import new_line
from engine_ext.simulate.measured import Measured, Played, Settings, measured
from engine_ext.simulate.ours import Ours, rules_of
from engine_ext.simulate.shared_engine import SharedEngine, new_shared_engine
from engine_ext.simulate.traffic import Traffic
from engine_ext.step.memory import new_memory

OURS = "batchweave"
ALONE = "online-only"


def run(traffic: Traffic, cost: CostModel, model: EngineModel, settings: Settings, slo: SloClass) -> Measured:
    """Run the dual scan for the batch. Raises TooLarge for a request that no cache can hold."""
    return measured(OURS, settings, [play(traffic, cost, model, settings, slo)], slo, cost)


def run_alone(traffic: Traffic, cost: CostModel, model: EngineModel, settings: Settings, slo: SloClass) -> Measured:
    """Run the online requests alone: no request of the batch, and no step cut short. Raises TooLarge."""
    return measured(ALONE, settings, [play_alone(traffic, cost, model, settings)], slo, cost)


def play(
    traffic: Traffic,
    cost: CostModel,
    model: EngineModel,
    settings: Settings,
    slo: SloClass,
    known_kv: Column | None = None,
) -> Played:
    """Run the dual scan on an engine of its own. Raises TooLarge.

    `known_kv`: the most KV tokens that online requests hold within a second from now, by steps of AHEAD_S; the scan
    then knows every length too. Nobody can know that; it shows what not knowing costs.
    """
    engine, cache = fresh_engine(traffic, model)
    run_scan(engine, cache, traffic, cost, model, settings, slo, known_kv)
    return Played(traffic, (engine,))


def play_alone(traffic: Traffic, cost: CostModel, model: EngineModel, settings: Settings) -> Played:
    """Run the online requests alone on an engine of its own. Raises TooLarge."""
    engine, cache = fresh_engine(traffic, model)
    run_scan(engine, cache, traffic, cost, model, settings, SloClass(), has_batch=False)
    return Played(traffic, (engine,))


def check_lengths(traffic: Traffic, model: EngineModel) -> None:
    """Raise TooLarge for a request that the KV cache cannot hold."""
    needed = traffic.lengths + traffic.output
    if len(needed) and int(needed.max()) >= model.capacity:
        raise TooLarge(int(needed.argmax()), int(needed.max()), model.capacity)


def fresh_engine(traffic: Traffic, model: EngineModel) -> tuple[SharedEngine, Cache]:
    """Return an engine and an empty cache as they are before anything has arrived. Raises TooLarge."""
    check_lengths(traffic, model)
    tree = traffic.everything
    leaf = np.empty(len(traffic.output), dtype=np.int64)
    leaf[tree.order] = tree.leaves
    online = np.arange(len(traffic.output)) >= traffic.batch
    arrives_s = np.zeros(len(traffic.output))
    arrives_s[traffic.batch :] = traffic.arrivals.arrives_s
    engine = new_shared_engine(leaf, traffic.lengths, traffic.output, online, arrives_s)
    return engine, new_cache(tree.parent, tree.begin, tree.end, model.capacity)


def run_scan(
    engine: SharedEngine,
    cache: Cache,
    traffic: Traffic,
    cost: CostModel,
    model: EngineModel,
    settings: Settings,
    slo: SloClass,
    known_kv: Column | None = None,
    has_batch: bool = True,
) -> None:
    """Run the dual scan on this engine; for `known_kv` see `play`. Without `has_batch` the batch never comes."""
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
    ours = _ours(traffic, model.numbers, settings, np.zeros(0, dtype=np.int64) if known_kv is None else known_kv)
    mixes, reserved = model.clock is not Clock.SEQUENTIAL, float(settings.reserved)
    rules = rules_of((slo,), int(settings.chunk), mixes, model.numbers, reserved)
    groups = group_requests(traffic.tree, None)
    known = np.full(count, UNKNOWN) if known_kv is None else traffic.output[:count]
    released = (traffic.group or count) if has_batch else 0
    progress = Progress.at_first(traffic.caps, known.copy(), np.zeros(count, dtype=np.bool_))
    while True:
        hidden = np.arange(count) >= released
        # As if ended and of known length, so that nothing is learned from those that are not there yet.
        progress = replace(progress, ended=progress.ended | hidden, known=np.where(hidden, 0, known))
        plan = plan_backlog(traffic.tree, groups, progress, cost, costs, generator)
        answers = answers_before_next(progress.learned)
        until_s = float(traffic.arrivals.duration_s)
        if run_ours(engine, cache, plan.state, line, ours, rules, answers, 0 < released < count, until_s):
            return
        progress = _go_on(progress, engine, plan.state)
        if has_batch and np.all(progress.ended[:released]):
            released += traffic.group


def _ours(traffic: Traffic, numbers: StepModel, settings: Settings, ahead: Column) -> Ours:
    def places() -> Column:
        return np.zeros(len(traffic.output), dtype=np.int64)

    memory = new_memory(numbers, numbers.capacity, settings.profiled)
    rests, ratio = np.zeros(len(traffic.output), dtype=np.bool_), np.full(1, float(settings.reserved))
    arrived, first = np.zeros((2, len(traffic.output)))
    return Ours(memory, places(), places(), places(), rests, np.zeros(1, dtype=np.int64), arrived, first, ratio, ahead)


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
