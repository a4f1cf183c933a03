"""Finds the settings with which a policy does most for a batch while online requests keep their bounds.

A policy with one knob, such as a limit of a step, is set by bisection from gentle to harsh; one with few settings tries
them all. Every policy is judged on the same traffic and the same engine, and against online requests alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from engine_ext.arrays import Column
from engine_ext.coserve.harvest import riding_tokens
from engine_ext.coserve.limit import Profiled
from engine_ext.coserve.slo import SloClass
from engine_ext.coserve.tuning import LEAST_CHUNK
from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import EngineModel
from engine_ext.plan.prompts import Prompts
from engine_ext.simulate.arrivals import Arrivals
from engine_ext.simulate.colocate import ALONE, OURS, run, run_alone
from engine_ext.simulate.measured import Measured, Settings
from engine_ext.simulate.traffic import Traffic

CHUNKS = (256, 512, 1024, 2048)
CHUNK_UNIT = 64  # tokens of which that chunk size is a multiple
PLACES = 48  # of a knob
EXCESS = np.geomspace(0.01, 20.0, PLACES)  # of a limit over the mean TBT of online alone, as a share of it
PRICES = np.geomspace(0.02, 20.0, PLACES)  # times the same TBT
ENDLESS_S = 1e6


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


@dataclass(frozen=True, slots=True)
class Choices:
    """Lists a policy's settings: `knobs`, each of them from gentle to harsh, and what is just `tried`."""

    knobs: tuple[list[Settings], ...] = ()
    tried: tuple[Settings, ...] = ()


@dataclass(frozen=True, slots=True)
class Grid:
    """Holds what the settings of a policy are made of.

    `chunks`: the chunk sizes of each knob; `sizes`: those of a policy without one. `tbt_s`: the mean TBT of online
    requests alone.
    """

    chunks: tuple[int, ...]
    sizes: tuple[int, ...]
    tbt_s: float

    def limits(self, chunk: int, **profiled: Any) -> list[Settings]:
        """Return settings that limit a step, from gentle to harsh."""
        limits = ((1.0 + float(excess)) * self.tbt_s for excess in EXCESS)
        return [Settings(chunk=chunk, profiled=Profiled(limit_s, **profiled)) for limit_s in limits]

    def prices(self, chunk: int, **profiled: Any) -> list[Settings]:
        """Return settings that price the delay of online requests, from gentle to harsh."""
        prices = (float(price) * self.tbt_s for price in PRICES)
        return [Settings(chunk=chunk, profiled=Profiled(price_s=price_s, **profiled)) for price_s in prices]


def chunk_sizes(grid: Grid) -> Choices:
    """Return the choices of a policy that has nothing to set but the chunk size."""
    return Choices(tried=tuple(Settings(chunk=chunk) for chunk in grid.sizes))


def our_choices(grid: Grid) -> Choices:
    """Return ours: no limit, a limit of a step, or a price, each with and without batches beside online prompts.

    A limit may also cut online prompts.
    """
    knobs = [
        knob
        for chunk in grid.chunks
        for knob in (
            grid.limits(chunk),
            grid.limits(chunk, prompts_alone=True),
            grid.limits(chunk, cuts_prompts=True),
            grid.prices(chunk),
            grid.prices(chunk, prompts_alone=True),
        )
    ]
    return Choices(tuple(knobs), tuple(Settings(chunk=chunk) for chunk in grid.chunks))


@dataclass(frozen=True, slots=True)
class Policy:
    """Says how a policy runs, and what it can be set to.

    `run` may raise TooLarge. `is_in_time`: it keeps bounds in seconds by itself, so no limit has to be found for them.
    `includes`: the policy whose runs are its runs too, since it may do what that one does.
    """

    run: Callable[[Any, CostModel, EngineModel, Settings, SloClass], Measured]
    choices: Callable[[Grid], Choices] = chunk_sizes
    is_in_time: bool = False
    includes: str | None = None


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {ALONE: Policy(run_alone), OURS: Policy(run, our_choices, is_in_time=True)}
)


@dataclass(eq=False)
class Contest:
    """Runs policies on one traffic, which all of them understand, and remembers what each setting gave.

    `base`: the run of online requests alone, with the chunk size that suits them best.
    """

    traffic: Any
    cost: CostModel
    model: EngineModel
    slo: SloClass
    policies: Mapping[str, Policy] = field(default_factory=lambda: POLICIES)
    runs: dict[tuple[str, Settings], Measured] = field(default_factory=dict[tuple[str, Settings], Measured])
    base: Measured = field(init=False)

    def __post_init__(self) -> None:
        alone = [self.measure(ALONE, Settings(chunk=chunk)) for chunk in self.chunks]
        self.base = min(alone, key=lambda found: (found.violations, found.normalized_latency))

    def measure(self, policy: str, settings: Settings) -> Measured:
        """Run a policy, or return what it gave before. Raises KeyError for an unknown one, TooLarge."""
        if (policy, settings) not in self.runs:
            found = self.policies[policy].run(self.traffic, self.cost, self.model, settings, self.slo)
            self.runs[policy, settings] = found
        return self.runs[policy, settings]

    def best(self, policy: str, within: Within) -> Measured | None:
        """Return the run that does most for the batch among those that keep the bounds; None if none does."""
        how = self.policies[policy]
        if how.includes is not None:
            self.best(how.includes, within)
        choices = how.choices(Grid(self._knob_chunks if within.most else self.chunks, self.chunks, self.base.tbt_mean))
        for each in choices.tried:
            self.measure(policy, each)
        is_easy = how.is_in_time and not within.most and self._kept(policy, within)
        for knob in () if is_easy else choices.knobs:  # bounds in seconds are what slack is for
            self._bisect(policy, knob, within)
        return max(self._kept(policy, within), key=lambda found: found.offline_tokens_per_s, default=None)

    @property
    def chunks(self) -> tuple[int, ...]:
        """The chunk sizes to try: CHUNKS, and before them what hides its GEMM behind reading the weights, if smaller.

        With that one, a step with prompts takes hardly longer than one without. Any has room for LEAST_CHUNK.
        """
        hidden = int(riding_tokens(self.model.numbers, 0)) // CHUNK_UNIT * CHUNK_UNIT
        return (hidden, *CHUNKS) if LEAST_CHUNK <= hidden < min(CHUNKS) else CHUNKS

    @property
    def _knob_chunks(self) -> tuple[int, ...]:
        """The chunk sizes with which knobs are tried under bounds against online alone: the base's and the next one.

        A still larger chunk delays every token more than such bounds allow, unless a limit cuts it down again.
        """
        place = self.chunks.index(self.base.settings.chunk)
        return self.chunks[place : place + 2]

    def _kept(self, policy: str, within: Within) -> list[Measured]:
        names = (policy, self.policies[policy].includes)
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


def online_capacity(prompts: Prompts, output: Column, cost: CostModel, model: EngineModel) -> float:
    """Return how many such requests per second the engine can do alone: all of them come at once."""
    count = len(output)
    at_once = Arrivals(np.zeros(count), np.arange(count), np.zeros(count, dtype=np.int64), ENDLESS_S)
    traffic = Traffic.of(prompts, output, np.zeros(0, dtype=np.int64), at_once)
    found = (run_alone(traffic, cost, model, Settings(chunk=chunk), SloClass()) for chunk in CHUNKS)
    return count / min(each.ended_s for each in found)
