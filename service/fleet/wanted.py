"""Decides how many engines each model should have, from its work, its deadlines and the GPUs there are.

All engines of all models share the GPUs. Over time they are one resource: what one model does not use, another does.
So deadlines are looked at together, earliest first (EDF). Where batches cannot all end in time, some are given up for
now: as few as possible (Moore-Hodgson), if GPUs could be divided at will. GPUs are then given in this order:

1. to the least number of engines of each model, and to busy engines that may not be taken yet;
2. to models whose deadlines are tight: if they waited for one switch more, one would be missed;
3. to engines that are busy;
4. to models with deadlines, as many engines as these need;
5. to models with more work, an engine for each `seconds_per_engine`;
6. to engines that have been idle for a short time only.

So a busy engine loses its GPUs only to the least number of engines of another model, or to a deadline. The keeper may
also move it from a machine that a larger engine needs.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

LEAST_S = 1.0  # a remainder that is shorter counts as this long


@dataclass(frozen=True, slots=True)
class Remainder:
    """Says what is left of a batch: `work_s` seconds of one engine, to be done before `due_at` in unix seconds."""

    due_at: float
    work_s: float


@dataclass(frozen=True, slots=True)
class Demand:
    """Describes a model's engines and work.

    `gpus`: of one engine; `least` and `most`: numbers of engines; `starts_s`: seconds until a new one is ready.
    `others`: engines that serve the model but are not the fleet's. Of the fleet's engines, `locked` are busy and may
    not be taken yet, `busy` are busy or starting (with the locked ones), and `running` are all that are to stay.
    `idle`: those of the rest that have been idle for so short a time that they may wait for work.
    """

    gpus: int
    least: int = 0
    most: int = 1
    starts_s: float = 120.0
    remainders: tuple[Remainder, ...] = ()
    others: int = 0
    locked: int = 0
    busy: int = 0
    idle: int = 0

    @property
    def running(self) -> int:
        return self.busy + self.idle

    def done_by(self, engines: int, seconds: float) -> float:
        """Return the seconds of work that so many engines do in `seconds` from now; new ones have to start first."""
        ready = self.others + min(engines, self.running)
        new = max(0, engines - self.running)
        return ready * max(0.0, seconds) + new * max(0.0, seconds - self.starts_s)


@dataclass(frozen=True, slots=True)
class _Item:
    """Puts a remainder on GPUs that are shared: how many GPU-seconds of `size` are to be done until `due_at`."""

    due_at: float
    size: float
    name: str
    remainder: Remainder


@dataclass(slots=True)
class _Share:
    """Keeps count of the GPUs that are given out."""

    demands: Mapping[str, Demand]
    free: int
    given: dict[str, int] = field(default_factory=dict[str, int])

    def give(self, name: str, engines: int) -> None:
        """Give the model up to so many engines in all, as far as there are GPUs."""
        demand, has = self.demands[name], self.given.get(name, 0)
        more = min(min(engines, demand.most) - has, self.free // demand.gpus)
        if more > 0:
            self.given[name] = has + more
            self.free -= more * demand.gpus


def wanted(
    demands: Mapping[str, Demand], gpus: int, now: float, seconds_per_engine: float, switch_s: float
) -> dict[str, int]:
    """Return how many engines of the fleet each model should have on `gpus` GPUs, which include those in use."""
    feasible = in_time(demands, gpus, now)
    tight = _tight(demands, feasible, gpus, now, switch_s)
    needs = {name: needed(each, feasible[name], now) for name, each in demands.items()}
    first_due = {name: remainders[0].due_at if remainders else math.inf for name, remainders in feasible.items()}
    share = _Share(demands, gpus, dict.fromkeys(demands, 0))
    for engines in (
        {name: max(each.least, each.locked) for name, each in demands.items()},
        {name: needs[name] for name in tight},
        {name: each.busy for name, each in demands.items()},
        needs,
        {name: useful(each, seconds_per_engine) for name, each in demands.items()},
        {name: each.running for name, each in demands.items()},
    ):
        for name in sorted(engines, key=lambda name: (first_due[name], name)):
            share.give(name, engines[name])
    return share.given


def in_time(demands: Mapping[str, Demand], gpus: int, now: float) -> dict[str, list[Remainder]]:
    """Return each model's remainders that can end in time, by deadline: all but as few as possible."""
    together: list[_Item] = []
    for name, demand in demands.items():
        starts_s = 0.0 if demand.running or demand.others else demand.starts_s
        alone = [
            _Item(remainder.due_at, max(remainder.work_s, LEAST_S), name, remainder) for remainder in demand.remainders
        ]
        for item in _on_time(alone, partial(demand.done_by, demand.most), now):
            together.append(_Item(item.due_at - starts_s, item.size * demand.gpus, name, item.remainder))
    kept = _on_time(together, lambda seconds: gpus * seconds, now)
    found: dict[str, list[Remainder]] = {name: [] for name in demands}
    for item in sorted(kept, key=lambda item: item.remainder.due_at):
        found[item.name].append(item.remainder)
    return found


def _on_time(items: Iterable[_Item], done_by: Callable[[float], float], now: float) -> list[_Item]:
    """Return as many of the items as can be on time: where one is late, the largest before it is left out.

    `done_by`: what can be done in so many seconds. This is the algorithm of Moore and Hodgson (1968).
    """
    kept: list[tuple[float, int, _Item]] = []
    total = 0.0
    for number, item in enumerate(sorted(items, key=lambda item: item.due_at)):
        heapq.heappush(kept, (-item.size, number, item))
        total += item.size
        if total > done_by(item.due_at - now):
            total += heapq.heappop(kept)[0]
    return [item for _, _, item in kept]


def _tight(
    demands: Mapping[str, Demand], feasible: Mapping[str, Sequence[Remainder]], gpus: int, now: float, switch_s: float
) -> set[str]:
    """Return the models that may miss a deadline if they wait for `switch_s` more.

    For that time only engines that are busy now count, and only those of models with a deadline that is as early.
    """
    later = now + switch_s
    found = {
        name for name, each in feasible.items() if not _ends_in_time(demands[name], each, demands[name].most, later)
    }
    items = sorted((each.due_at, max(each.work_s, LEAST_S), name) for name, kept in feasible.items() for each in kept)
    seen, work, busy = set[str](), 0.0, 0
    for due_at, work_s, name in items:
        demand = demands[name]
        if name not in seen:
            seen.add(name)
            busy += demand.busy * demand.gpus
        work += work_s * demand.gpus
        starts_s = 0.0 if demand.running or demand.others else demand.starts_s
        if work > gpus * (due_at - starts_s - later) + busy * switch_s:
            found |= seen
    return found


def useful(demand: Demand, seconds_per_engine: float) -> int:
    """Return how many engines of the fleet the model's whole work is worth."""
    work_s = sum(max(remainder.work_s, LEAST_S) for remainder in demand.remainders)
    return max(0, math.ceil(work_s / seconds_per_engine) - demand.others)


def needed(demand: Demand, remainders: Sequence[Remainder], now: float) -> int:
    """Return the smallest number of engines that ends all remainders in time, or the most that is allowed.

    `remainders`: by deadline.
    """
    most = demand.most
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        if _ends_in_time(demand, remainders, middle, now):
            high = middle
        else:
            low = middle + 1
    return low


def _ends_in_time(demand: Demand, remainders: Sequence[Remainder], engines: int, now: float) -> bool:
    before_s = 0.0
    for remainder in remainders:
        before_s += max(remainder.work_s, LEAST_S)
        if before_s > demand.done_by(engines, remainder.due_at - now):
            return False
    return True
