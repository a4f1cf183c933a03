"""Makes the traffic of benchmarks.online, and says what the simulator gives for it."""

import argparse
from dataclasses import dataclass
from functools import cached_property
from statistics import mean

import numpy as np

from benchmarks import online_traffic
from benchmarks.colocate import FLOOD_S, MACHINES
from benchmarks.emulated import tokens_of
from benchmarks.online_traffic import Online, batch_rows
from benchmarks.simulate.beside import play as simulate
from benchmarks.traces import Row
from engine_ext.arrays import column
from engine_ext.coserve.slo import SloClass
from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import EngineModel
from engine_ext.simulate.arrivals import Arrivals, at_rate
from engine_ext.simulate.contest import online_capacity
from engine_ext.simulate.measured import Settings, measured
from engine_ext.simulate.shared_engine import DONE
from engine_ext.simulate.traffic import Traffic

CHUNK = 2048  # prompt tokens of a step
LONGEST = 16_384  # tokens of a request; longer ones are left out
WARM_UP = 0.2  # of the arrivals' time


@dataclass(frozen=True)
class Machines:
    """Describes `workers` machines with the costs of `cost` and `model`, all of them `slowed` times."""

    cost: CostModel
    model: EngineModel
    workers: int
    slowed: float

    def slo(self, slowed: float) -> SloClass:
        return SloClass(ttft_s=1.0 * slowed, tpot_s=0.05 * slowed)


@dataclass(frozen=True)
class Scene(Machines):
    """Holds the traffic of a run on such machines."""

    online: Online
    arrivals: Arrivals
    rows: list[Row]

    @cached_property
    def outputs(self) -> list[int]:
        """The output tokens of the batch's requests."""
        return [row.output_tokens for row in self.rows]

    @cached_property
    def prompts(self) -> tuple[list[list[int]], list[list[int]]]:
        """The token ids of the batch's prompts, and of those of online requests."""
        ids = tokens_of([*(row.segments for row in self.rows), *self.online.named(self.arrivals)])
        return ids[: len(self.rows)], ids[len(self.rows) :]

    @property
    def duration_s(self) -> float:
        return self.arrivals.duration_s * self.slowed

    def simulated(self, policy: str) -> dict[str, float]:
        """Return what the simulator says of engines among which the online requests are dealt out in turn.

        The batch's tokens are counted as those of the service: of answers that end while online requests come, without
        the first part of that time, because these engines begin empty.
        """
        found = [self._simulated(policy, number) for number in range(self.workers)]
        return {
            "attained": 1.0 - mean(late for late, _ in found),
            "batch_tokens_per_s": sum(tokens for _, tokens in found) / self.slowed,
        }

    def _simulated(self, policy: str, number: int) -> tuple[float, float]:
        """Return the share of one engine's online requests that were late, and the batch's tokens per second."""
        part = slice(number, None, self.workers)
        every = self.arrivals
        arrivals = Arrivals(every.arrives_s[part], every.number[part], every.copy[part], every.duration_s)
        prompts, output, _ = online_traffic.together(self.rows, self.online, arrivals)
        caps = np.array(self.outputs, dtype=np.int64)  # as max_tokens in the batch's file says
        traffic, settings, slo = Traffic.of(prompts, output, caps, arrivals), Settings(chunk=CHUNK), self.slo(1.0)
        played = simulate(traffic, self.cost, self.model, policy, settings, slo)
        batch, requests = slice(0, traffic.batch), played.engines[0].requests
        until_s, since_s = arrivals.duration_s, WARM_UP * arrivals.duration_s
        last_s = np.where(column(requests, "state") == DONE, column(requests, "last_s"), np.inf)[batch]
        ended = (last_s > since_s) & (last_s <= until_s)
        tokens = (traffic.lengths + traffic.output)[batch][ended].sum()
        late = measured(policy, settings, [played], slo, self.cost).violations
        return late, float(tokens) / (until_s - since_s)


def scene(given: argparse.Namespace) -> Scene:
    """Return online requests at a share of what the workers can do of them, and a batch."""
    place = MACHINES["h200"]
    cost, model = place.engine()
    online = online_traffic.conversations(given.data, LONGEST)
    own_rate = len(online.arrives_s) / online.arrives_s[-1]
    generator = np.random.default_rng(given.seed)
    flood = at_rate(online.arrives_s, own_rate, FLOOD_S, generator)
    rate = given.load * given.workers * online_capacity(*online.at(flood), cost, model)
    arrivals = at_rate(online.arrives_s, rate, given.seconds / given.slowed, generator)
    rows = batch_rows(given.data, given.batch, given.seed, LONGEST, given.requests)
    return Scene(cost, model, given.workers, given.slowed, online, arrivals, rows)
