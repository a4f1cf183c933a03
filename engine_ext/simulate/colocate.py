"""Runs the policies for online requests beside a batch, each on the same engine, and measures both sides."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from engine_ext.arrays import Bools, Column, Floats, column
from engine_ext.coserve.limit import NOT_PROFILED, Profiled
from engine_ext.coserve.predictor import new_predictor
from engine_ext.coserve.reserve import new_held
from engine_ext.coserve.slo import SloClass
from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import Clock, EngineModel, StepModel
from engine_ext.errors import InputError, TooLarge
from engine_ext.plan.groups import group_requests
from engine_ext.plan.lengths import UNKNOWN
from engine_ext.plan.prompts import Prompts
from engine_ext.plan.tree import PrefixTree, build_tree
from engine_ext.scan.footprint import output_tokens
from engine_ext.scan.replan import Progress, answers_before_next, plan_backlog
from engine_ext.scan.state import State, StepCosts
from engine_ext.simulate.arrivals import Arrivals
from engine_ext.simulate.bros import new_packing, run_bros
from engine_ext.simulate.cache import Cache, new_cache
from engine_ext.simulate.coserving import AHEAD_S, Ours, Rules, progress_of, run_ours
from engine_ext.simulate.rivals import Rival, new_line, run_rival
from engine_ext.simulate.shared_engine import DONE, SharedEngine, new_shared_engine

NO_LIMIT = math.inf


@dataclass(frozen=True, slots=True)
class Traffic:
    """Online requests, and the requests of a batch that wait from the start; both with prompts and true outputs.

    `everything`: the prefix tree of the batch's requests and the online ones, in this order; `tree`: that of the batch
    alone. `caps`: the batch's max_tokens. `group`: how many of the batch's requests there are at a time, the next when
    all of them have ended; 0 for all at once.
    """

    everything: PrefixTree
    tree: PrefixTree
    lengths: Column
    output: Column
    batch: int
    caps: Column
    arrivals: Arrivals
    group: int = 0

    @classmethod
    def of(cls, prompts: Prompts, output: Column, caps: Column, arrivals: Arrivals, group: int = 0) -> "Traffic":
        """Build the trees. `prompts` and `output` have the batch first, then one for each arrival; `caps` the batch."""
        batch = len(caps)
        end = int(prompts.starts[batch])
        sizes = None if prompts.sizes is None else prompts.sizes[:end]
        alone = Prompts(prompts.tokens[:end], prompts.starts[: batch + 1], sizes)
        return cls(
            build_tree(prompts),
            build_tree(alone),
            prompts.lengths,
            output.astype(np.int64),
            batch,
            caps,
            arrivals,
            group,
        )

    def without_online(self) -> "Traffic":
        """Return the batch alone."""
        nobody = np.zeros(0, dtype=np.int64)
        return replace(
            self,
            everything=self.tree,
            lengths=self.lengths[: self.batch],
            output=self.output[: self.batch],
            arrivals=replace(self.arrivals, arrives_s=np.zeros(0), number=nobody, copy=nobody),
        )


@dataclass(frozen=True, slots=True)
class Settings:
    """What a policy is set to. `chunk`: the most tokens of a step. `profiled`: the limits of a step.

    `rate`: requests of the batch per second, for policies that bound it. `reserved`: SGLang's new token ratio.
    `most_decoding`: the most requests on an engine that only decodes, for policies that bound them.
    """

    chunk: int = 512
    profiled: Profiled = NOT_PROFILED
    rate: float = NO_LIMIT
    reserved: float = 0.5
    most_decoding: float = NO_LIMIT
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Measured:
    """The results of one run. Times are in seconds.

    `offline_tokens_per_s`: tokens of the batch in the second half of the time of the arrivals, each once, however often
    it is computed; in the first half the KV cache fills.
    `violations`: the share of online requests that missed one of the class's bounds, or had not ended when the run was
    given up. `normalized_latency`: seconds from arrival to end per output token, as a mean over requests. `ended_s`:
    the time of the last online token. `batch_ended`: requests of the batch that have ended, also after the arrivals,
    with `batch_ended_tokens` in all.
    """

    policy: str
    settings: Settings
    online_tokens_per_s: float
    offline_tokens_per_s: float
    ttft_mean: float
    ttft_p99: float
    tbt_mean: float
    tbt_p99: float
    normalized_latency: float
    ttft_attained: float
    tpot_attained: float
    violations: float
    preemptions: int
    recomputed_tokens: int
    restored_tokens: int
    left_out: int
    steps: int
    busy: float
    ended_s: float
    batch_ended: int
    batch_ended_tokens: int


@dataclass(frozen=True, slots=True)
class Times:
    """Says when online requests came and got their tokens, in seconds, by request; `now_s`: when the run ended for it.

    `gap_s`: the longest time between two of its tokens; `gaps`: all times between two tokens.
    """

    now_s: Floats
    arrives_s: Floats
    first_s: Floats
    last_s: Floats
    generated: Column
    ended: Bools
    gap_s: Floats
    gaps: Floats

    def latencies(self, slo: SloClass) -> dict[str, float]:
        """Return the fields of `Measured` that say what online requests got."""
        begun, bounds, count = self.generated > 0, slo.bounds, max(1, len(self.arrives_s))
        ttft = np.where(begun, self.first_s, self.now_s) - self.arrives_s
        tpot = np.where(self.generated > 1, (self.last_s - self.first_s) / np.maximum(self.generated - 1, 1), 0.0)
        late = (ttft > bounds.ttft_s) | (tpot > bounds.tpot_s) | (self.gap_s > bounds.tbt_s) | ~self.ended
        whole_s = np.where(self.ended, self.last_s, self.now_s) - self.arrives_s
        return {
            "ttft_mean": _mean(ttft),
            "ttft_p99": _quantile(ttft),
            "tbt_mean": _mean(self.gaps),
            "tbt_p99": _quantile(self.gaps),
            "normalized_latency": _mean(whole_s / np.maximum(self.generated, 1)),
            "ttft_attained": float(np.count_nonzero(begun & (ttft <= bounds.ttft_s))) / count,
            "tpot_attained": float(np.count_nonzero(self.ended & (tpot <= bounds.tpot_s))) / count,
            "violations": float(np.count_nonzero(late)) / count,
        }


@dataclass(frozen=True, slots=True)
class Played:
    """Holds what a policy did with some traffic; `engines`: those that served it, which have the same requests."""

    traffic: Traffic
    engines: tuple[SharedEngine, ...]


def run(
    traffic: Traffic, cost: CostModel, model: EngineModel, policy: str, settings: Settings, slo: SloClass
) -> Measured:
    """Run one policy. Raises InputError for an unknown one, TooLarge for a request that no cache can hold."""
    return measured(policy, settings, [play(traffic, cost, model, policy, settings, slo)], slo)


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
    rules = Rules(slo.bounds, settings.profiled.numbers(), int(settings.chunk))
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
    held = np.zeros(int(ends.max(initial=0)) + 2, dtype=np.int64)
    np.add.at(held, begins, kv)
    np.add.at(held, ends, -kv)
    second = round(1.0 / AHEAD_S)
    return sliding_window_view(np.pad(np.cumsum(held), (0, second - 1)), second).max(axis=1)


def _ours(traffic: Traffic, numbers: StepModel, ahead: Column) -> Ours:
    def places() -> Column:
        return np.zeros(len(traffic.output), dtype=np.int64)

    rests = np.zeros(len(traffic.output), dtype=np.bool_)
    held, decoded = new_held(numbers.capacity), np.zeros(1, dtype=np.int64)
    return Ours(new_predictor(numbers), held, places(), places(), places(), rests, decoded, ahead)


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


def measured(policy: str, settings: Settings, played: Sequence[Played], slo: SloClass) -> Measured:
    """Return the results of a run, in which each part had engines and traffic of its own."""

    def online(name: str) -> Floats:
        parts = [column(each.engines[0].requests, name)[each.traffic.batch :] for each in played]
        return np.concatenate(parts)

    totals = [engine.totals[0] for each in played for engine in each.engines]
    firsts = [each.engines[0].totals[0] for each in played]
    now = [np.full(len(p.traffic.arrivals), max(float(e.totals[0].now_s) for e in p.engines)) for p in played]
    tokens = [(p.traffic.lengths + p.traffic.output)[p.traffic.batch :] for p in played]
    ended = online("state") == DONE
    times = Times(
        np.concatenate(now),
        online("arrives_s"),
        online("first_s"),
        online("last_s"),
        online("generated").astype(np.int64),
        ended,
        online("gap_s"),
        np.concatenate([engine.gaps[: engine.totals[0].gaps] for each in played for engine in each.engines]),
    )
    duration = played[0].traffic.arrivals.duration_s
    over = [column(each.engines[0].requests, "state")[: each.traffic.batch] == DONE for each in played]
    return Measured(
        policy=policy,
        settings=settings,
        online_tokens_per_s=float(np.concatenate(tokens)[ended].sum()) / duration,
        offline_tokens_per_s=sum(int(each.at_end - each.at_half) for each in firsts) / (duration / 2),
        **times.latencies(slo),
        preemptions=sum(int(each.preemptions) for each in totals),
        recomputed_tokens=sum(int(each.recomputed) for each in totals),
        restored_tokens=sum(int(each.restored) for each in totals),
        left_out=sum(int(each.left_out) for each in totals),
        steps=sum(int(each.steps) for each in totals),
        busy=float(np.mean([each.busy_s / max(each.now_s, 1e-9) for each in totals])),
        ended_s=float(times.last_s.max(initial=0.0)),
        batch_ended=sum(int(np.count_nonzero(each)) for each in over),
        batch_ended_tokens=sum(
            int((each.traffic.lengths + each.traffic.output)[: each.traffic.batch][done].sum())
            for each, done in zip(played, over, strict=True)
        ),
    )


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else 0.0


def _quantile(values: Floats) -> float:
    return float(np.quantile(values, 0.99)) if len(values) else 0.0


@dataclass(frozen=True, slots=True)
class Rule:
    """What makes a rival; see `Rival`. `batch`: whether it runs the batch at all; `depth_first`: in which order."""

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
