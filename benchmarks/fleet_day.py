"""Simulate a day of a fleet with three models whose batches have deadlines, and compare ways to divide its GPUs.

All of it is simulated: batches are seconds of work that engines do at an even pace, an engine takes `START_S` to start,
and a batch's work can be divided among all engines of its model. A batch that is late runs to its end, so that all ways
do the same work, and what differs in GPU hours is what engines spend on starting and on waiting. Three ways:

- fleet:    what `batchweave fleet` decides (service/fleet/wanted.py), every 30 s, with its default settings; `slow`
            with an engine for each two hours of work and not one, and away after a minute without work and not two
- fixed:    each model has its own GPUs all day, divided by the work of the day, which nobody knows beforehand
- queue:    as KEDA scales: an engine of a model for each so many requests that wait, at most as many as there are GPUs
            free, and away 300 s after it was last wanted

    python -m benchmarks.fleet_day                # 20 days
    python -m benchmarks.fleet_day --days 3 --load 0.9 --gpus 32
"""

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from service.fleet.spec import FleetSpec
from service.fleet.wanted import Demand, Remainder, wanted

STEP_S = 30.0
DAY_S = 24 * 3600.0
START_S = 120.0
COOLDOWN_S = 300.0
# Requests per engine, for the queue's scaling.
TARGETS = (2000, 8000, 32_000, 128_000)


@dataclass(frozen=True)
class Model:
    """`gpus`: of an engine; `pace`: requests that it answers in a second; `share`: of the day's work."""

    name: str
    gpus: int
    pace: float
    share: float


MODELS = (Model("8b", 1, 40.0, 0.35), Model("32b", 2, 12.0, 0.30), Model("235b", 8, 6.0, 0.35))
# Windows that clients ask for, in hours, and how often: most take the default.
WINDOWS_H, OFTEN = (1.0, 4.0, 12.0, 24.0), (0.25, 0.25, 0.15, 0.35)


@dataclass
class Batch:
    model: Model
    comes_at: float
    due_at: float
    requests: int
    left_s: float  # of one engine
    ended_at: float = math.inf

    @property
    def left(self) -> float:
        return self.left_s * self.model.pace


def day(seed: int, gpus: int, load: float) -> list[Batch]:
    """Return a day's batches: sizes are lognormal, and more come in working hours; `load`: of all GPUs over the day."""
    rng = np.random.default_rng(seed)
    found: list[Batch] = []
    for model in MODELS:
        work_s, wanted_s = 0.0, load * model.share * gpus * DAY_S / model.gpus
        while work_s < wanted_s:
            hour = float(np.clip(rng.normal(13.0, 4.0), 0.0, 23.0)) if rng.random() < 0.8 else rng.uniform(0, 23.0)
            size_s = float(np.clip(rng.lognormal(math.log(1500.0), 1.1), 60.0, 6 * 3600.0))
            window_h = float(rng.choice(WINDOWS_H, p=OFTEN))
            comes_at = hour * 3600.0
            # Nobody asks for what the whole fleet could not do in the window.
            most_s = 0.5 * window_h * 3600.0 * (gpus // model.gpus)
            size_s = min(size_s, most_s)
            found.append(Batch(model, comes_at, comes_at + window_h * 3600.0, int(size_s * model.pace), size_s))
            work_s += size_s
    return sorted(found, key=lambda batch: batch.comes_at)


@dataclass
class Engine:
    model: Model
    ready_at: float
    idle_since: float
    works: bool = False


@dataclass
class Fleet:
    """The state that a way to decide sees: the time, the batches that are not done, and the engines."""

    gpus: int
    now: float = 0.0
    batches: list[Batch] = field(default_factory=list[Batch])
    engines: list[Engine] = field(default_factory=list[Engine])
    wanted_at: dict[str, float] = field(default_factory=dict[str, float])

    def of(self, model: Model) -> list[Engine]:
        return [each for each in self.engines if each.model == model]

    def left(self, model: Model) -> list[Batch]:
        return sorted((each for each in self.batches if each.model == model), key=lambda batch: batch.due_at)


Way = Callable[[Fleet], dict[str, int]]


def by_fleet(**changes: float) -> Way:
    """Decide as a fleet with the settings of fleet.yaml does: the defaults, or these."""
    spec = FleetSpec.model_validate({"models": [{"name": model.name} for model in MODELS], **changes})
    return lambda fleet: _by_fleet(fleet, spec)


def _by_fleet(fleet: Fleet, spec: FleetSpec) -> dict[str, int]:
    demands: dict[str, Demand] = {}
    for model in MODELS:
        engines, jobs = fleet.of(model), fleet.left(model)
        busy = [each for each in engines if each.works or (each.ready_at > fleet.now and jobs)]
        idle = [each for each in engines if each not in busy and fleet.now - each.idle_since < spec.idle_s]
        demands[model.name] = Demand(
            gpus=model.gpus,
            most=fleet.gpus // model.gpus,
            starts_s=START_S,
            remainders=tuple(Remainder(batch.due_at, batch.left_s) for batch in jobs),
            locked=sum(fleet.now - each.ready_at < spec.switch_s for each in busy),
            busy=len(busy),
            idle=len(idle),
        )
    return wanted(demands, fleet.gpus, fleet.now, spec.seconds_per_engine, spec.switch_s)


def fixed(shares: dict[str, float]) -> Way:
    """Divide the GPUs by these shares, once: whole engines, at least one of each model."""
    return lambda fleet: divided(fleet.gpus, shares)


def divided(gpus: int, shares: dict[str, float]) -> dict[str, int]:
    engines = {model.name: max(1, int(gpus * shares[model.name] / model.gpus)) for model in MODELS}
    free = gpus - sum(engines[model.name] * model.gpus for model in MODELS)
    while True:
        fits = [model for model in MODELS if model.gpus <= free]
        if not fits:
            return engines
        least = min(fits, key=lambda model: engines[model.name] * model.gpus / shares[model.name])
        engines[least.name] += 1
        free -= least.gpus


def by_queue(target: int) -> Way:
    """Scale each model on its own; who comes first gets the GPUs, as pods do that wait for a place."""

    def decide(fleet: Fleet) -> dict[str, int]:
        found: dict[str, int] = {}
        free = fleet.gpus - sum(each.model.gpus for each in fleet.engines)
        for model in MODELS:
            has = len(fleet.of(model))
            asks = math.ceil(sum(batch.left for batch in fleet.left(model)) / target)
            if asks >= has:
                fleet.wanted_at[model.name] = fleet.now
                more = min(asks - has, free // model.gpus)
                free -= more * model.gpus
                found[model.name] = has + more
            else:
                rests = fleet.now - fleet.wanted_at.get(model.name, 0.0) < COOLDOWN_S
                found[model.name] = has if rests else asks
        return found

    return decide


def run(batches: list[Batch], gpus: int, decide: Way) -> tuple[int, float]:
    """Run a day and what is left of it after midnight; return deadlines met, and the GPU hours that engines took."""
    fleet = Fleet(gpus)
    coming: Iterator[Batch] = iter(batches)
    following = next(coming, None)
    gpu_s = 0.0
    while following is not None or fleet.batches:
        while following is not None and following.comes_at <= fleet.now:
            fleet.batches.append(following)
            following = next(coming, None)
        _change(fleet, decide(fleet))
        for model in MODELS:
            _work(fleet, model)
        gpu_s += STEP_S * sum(each.model.gpus for each in fleet.engines)
        fleet.now += STEP_S
        for batch in [each for each in fleet.batches if each.left_s <= 0]:
            batch.ended_at = fleet.now
            fleet.batches.remove(batch)
    return sum(batch.ended_at <= batch.due_at + STEP_S for batch in batches), gpu_s / 3600.0


def _change(fleet: Fleet, targets: dict[str, int]) -> None:
    for model in MODELS:
        too_many = len(fleet.of(model)) - targets[model.name]
        leaves = sorted(
            fleet.of(model), key=lambda each: (each.works, each.idle_since if not each.works else -each.ready_at)
        )
        for each in leaves[: max(0, too_many)]:
            fleet.engines.remove(each)
    for model in MODELS:
        for _ in range(targets[model.name] - len(fleet.of(model))):
            if sum(each.model.gpus for each in fleet.engines) + model.gpus <= fleet.gpus:
                fleet.engines.append(Engine(model, fleet.now + START_S, fleet.now))


def _work(fleet: Fleet, model: Model) -> None:
    """Let the ready engines of a model work for a step, on the batch that is due first."""
    ready = [each for each in fleet.of(model) if each.ready_at <= fleet.now]
    can_s = STEP_S * len(ready)
    for batch in fleet.left(model):
        does = min(batch.left_s, can_s)
        batch.left_s -= does
        can_s -= does
    used = math.ceil(len(ready) - can_s / STEP_S)
    for place, each in enumerate(ready):
        each.works = place < used
        if each.works:
            each.idle_since = fleet.now + STEP_S


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=int, default=20)
    parser.add_argument("--gpus", type=int, default=24)
    parser.add_argument("--load", type=float, default=0.7, help="work of a day, as a share of all GPUs' time")
    given = parser.parse_args()
    ways: dict[str, Way] = {
        "fleet": by_fleet(),
        "fleet, slow": by_fleet(seconds_per_engine=7200.0, idle_s=60.0),
        "fixed": fixed({model.name: model.share for model in MODELS}),
        **{f"queue/{target}": by_queue(target) for target in TARGETS},
    }
    batches = sum(len(day(seed, given.gpus, given.load)) for seed in range(given.days))
    work = sum(
        batch.left_s * batch.model.gpus for seed in range(given.days) for batch in day(seed, given.gpus, given.load)
    )
    print(
        f"{given.days} days, seeds 0 to {given.days - 1}; {given.gpus} GPUs, load {given.load}; {batches} batches, "
        f"{work / 3600 / given.days:.1f} GPU hours of work a day"
    )
    for name, way in ways.items():
        met, hours = zip(
            *(run(day(seed, given.gpus, given.load), given.gpus, way) for seed in range(given.days)), strict=True
        )
        print(
            f"{name:12} {sum(met) / batches:7.2%} of the deadlines met, {sum(hours) / given.days:7.1f} GPU hours a day",
            flush=True,
        )


if __name__ == "__main__":
    main()
