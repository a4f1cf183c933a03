"""Says what a policy is set to, and what its run gave online requests and the batch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine_ext.arrays import Bools, Column, Floats, column
from engine_ext.coserve.limit import NOT_PROFILED, Profiled
from engine_ext.coserve.slo import SloClass
from engine_ext.costs.cost import CostModel
from engine_ext.plan.resources import Requests, request_loads
from engine_ext.plan.tree import PrefixTree
from engine_ext.simulate.shared_engine import DONE, SharedEngine
from engine_ext.simulate.traffic import Traffic

NO_LIMIT = math.inf


@dataclass(frozen=True, slots=True)
class Settings:
    """Says what a policy is set to. `profiled`: the limits of a step.

    `chunk`: the most prompt tokens of a step; for policies that count decodes as SGLang does, these are among them.
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
    """Holds the results of one run. Times are in seconds.

    `offline_tokens_per_s`: the batch's tokens, times the share of its work that is done when the time of the arrivals
    is over (`tokens_done`), by this time.
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


def tokens_done(tree: PrefixTree, output: Column, generated: Column, cost: CostModel) -> float:
    """Return the batch's tokens, times the share of its work that is done: seconds of GEMM, attention and KV reads.

    `tree`: that of the batch's prompts. `output`, `generated`: int64 [requests], tokens by request. A prompt counts
    with the first token of its answer. Requests that share a prefix have equal parts of its work, so it counts once,
    however often it is computed. To count the tokens that are done would favour a scheduler that takes first what has
    short answers, or what many share.
    """
    if len(output) == 0 or len(generated) == 0:
        return 0.0
    prompt = tree.lengths

    def work_s(tokens: Column) -> float:
        compute, memory = request_loads(tree, Requests.exact(prompt, tokens), cost)
        return float((compute + memory)[tokens[tree.order] > 0].sum())

    return float((prompt + output).sum()) * work_s(generated) / work_s(output)


def measured(policy: str, settings: Settings, played: Sequence[Played], slo: SloClass, cost: CostModel) -> Measured:
    """Return the results of a run, in which each part had engines and traffic of its own."""

    def online(name: str) -> Floats:
        parts = [column(each.engines[0].requests, name)[each.traffic.batch :] for each in played]
        return np.concatenate(parts)

    totals = [engine.totals[0] for each in played for engine in each.engines]
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
        offline_tokens_per_s=sum(_tokens_done(each, cost) for each in played) / duration,
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


def _tokens_done(played: Played, cost: CostModel) -> float:
    batch, requests = slice(0, played.traffic.batch), played.engines[0].requests
    output, counted = (column(requests, name)[batch] for name in ("output", "counted"))
    return tokens_done(played.traffic.tree, output, counted, cost)


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else 0.0


def _quantile(values: Floats) -> float:
    return float(np.quantile(values, 0.99)) if len(values) else 0.0
