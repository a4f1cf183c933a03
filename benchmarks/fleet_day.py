"""Simulate days of a fleet with three models whose batches have deadlines, and compare ways to divide its GPUs.

All of it is simulated: batches are seconds of work that engines do at an even pace, and a batch's work can be divided
among all engines of its model, the earliest deadline first. An engine takes 120 s to start, and holds its GPUs for 60 s
after it is taken away busy. Days follow each other, and a batch ends with its window, as in the service. Three ways:

- fleet:    what `batchweave fleet` decides (service/fleet/wanted.py), every 30 s, with its default settings;
            `10 min` where a busy engine keeps its GPUs for 10 minutes and not 30; `patient` with an engine for each
            12 hours of work and not one, away after 30 s without work, and for at least an hour while it is busy.
            Its estimates of work are wrong, by a factor of up to two for each batch
- fixed:    each model has its own GPUs all day, divided by the work of the days, which nobody knows before
- queue:    as KEDA scales: an engine of a model for each so many requests that wait, as many as it does in so many
            seconds, if there are GPUs free; models take turns to come first. An engine goes after a cooldown

    python -m benchmarks.fleet_day                # 20 days
    python -m benchmarks.fleet_day --days 3 --load 0.85 --gpus 32
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from service.fleet.spec import FleetSpec
from service.fleet.wanted import Demand, Remainder, wanted

STEP_S = 30.0
DAY_S = 24 * 3600.0
START_S = 120.0
DRAIN_S = 60.0
# For the queue's scaling: seconds of work that wait for each engine, and the cooldown.
TARGETS_S, COOLDOWNS_S = (300, 1200, 3600, 10_800), (60, 300)


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
    """`left_s`: what is left, in seconds of one engine; `guess`: by what factor the fleet's estimate of it is wrong."""

    model: Model
    comes_at: float
    due_at: float
    work_s: float
    guess: float
    left_s: float = 0.0

    def __post_init__(self) -> None:
        self.left_s = self.work_s


def day(seed: int, gpus: int, load: float) -> list[Batch]:
    """Return a day's batches: sizes are lognormal, and more come in working hours; `load`: of all GPUs over the day.

    Nobody asks for more than half of what all GPUs could do in the window.
    """
    rng = np.random.default_rng(seed)
    found: list[Batch] = []
    for model in MODELS:
        work_s, wanted_s = 0.0, load * model.share * gpus * DAY_S / model.gpus
        while work_s < wanted_s:
            hour = float(np.clip(rng.normal(13.0, 4.0), 0.0, 23.9)) if rng.random() < 0.8 else rng.uniform(0, 24.0)
            window_s = 3600.0 * float(rng.choice(WINDOWS_H, p=OFTEN))
            size_s = float(np.clip(rng.lognormal(math.log(1500.0), 1.1), 60.0, 6 * 3600.0))
            size_s = min(size_s, 0.5 * window_s * (gpus // model.gpus))
            comes_at = seed * DAY_S + hour * 3600.0
            found.append(Batch(model, comes_at, comes_at + window_s, size_s, float(2 ** rng.uniform(-1, 1))))
            work_s += size_s
    return sorted(found, key=lambda batch: batch.comes_at)


@dataclass
class Engine:
    """`leaves_at`: when it frees its GPUs, once it was taken away."""

    model: Model
    ready_at: float
    idle_since: float
    works: bool = False
    leaves_at: float = math.inf


@dataclass
class Fleet:
    """The state that a way to decide sees: the time, the batches that are not done, and the engines."""

    gpus: int
    now: float = 0.0
    batches: list[Batch] = field(default_factory=list[Batch])
    engines: list[Engine] = field(default_factory=list[Engine])
    wanted_at: dict[str, float] = field(default_factory=dict[str, float])

    def of(self, model: Model) -> list[Engine]:
        return [each for each in self.engines if each.model == model and each.leaves_at == math.inf]

    @property
    def free(self) -> int:
        return self.gpus - sum(each.model.gpus for each in self.engines)

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
        engines, left = fleet.of(model), fleet.left(model)
        busy = [each for each in engines if each.works or (each.ready_at > fleet.now and left)]
        idle = [
            each
            for each in engines
            if each not in busy and fleet.now - max(each.idle_since, each.ready_at) < spec.idle_s
        ]
        demands[model.name] = Demand(
            gpus=model.gpus,
            most=fleet.gpus // model.gpus,
            starts_s=START_S,
            remainders=tuple(Remainder(batch.due_at, batch.left_s * batch.guess) for batch in left),
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


def by_queue(target_s: float, cooldown_s: float) -> Way:
    """Scale each model on its own; the GPUs that are free are for the first to ask, as for pods that wait."""

    def decide(fleet: Fleet) -> dict[str, int]:
        found: dict[str, int] = {}
        free, first = fleet.free, int(fleet.now / STEP_S) % len(MODELS)
        for model in (*MODELS[first:], *MODELS[:first]):
            has = len(fleet.of(model))
            waiting = sum(batch.left_s * model.pace for batch in fleet.left(model))
            asks = math.ceil(waiting / (target_s * model.pace))
            if asks >= has:
                fleet.wanted_at[model.name] = fleet.now
                more = min(asks - has, free // model.gpus)
                free -= more * model.gpus
                found[model.name] = has + more
            else:
                rests = fleet.now - fleet.wanted_at.get(model.name, 0.0) < cooldown_s
                found[model.name] = has if rests else asks
        return found

    return decide


class Outcome(NamedTuple):
    """Counts deadlines that were met, hours of GPUs that engines held, and those in which they did work."""

    met: int
    hours: float
    worked: float


def run(batches: Sequence[Batch], gpus: int, decide: Way) -> Outcome:
    """Run these batches until none is left."""
    fleet = Fleet(gpus)
    coming = iter(batches)
    following = next(coming, None)
    met, held_s, worked_s = 0, 0.0, 0.0
    while following is not None or fleet.batches:
        while following is not None and following.comes_at <= fleet.now:
            fleet.batches.append(following)
            following = next(coming, None)
        _change(fleet, decide(fleet))
        worked_s += sum(_work(fleet, model) * model.gpus for model in MODELS)
        held_s += STEP_S * (fleet.gpus - fleet.free)
        fleet.now += STEP_S
        met += sum(batch.left_s <= 0 for batch in fleet.batches)
        fleet.batches = [batch for batch in fleet.batches if batch.left_s > 0 and batch.due_at > fleet.now]
    return Outcome(met, held_s / 3600.0, worked_s / 3600.0)


def _change(fleet: Fleet, targets: dict[str, int]) -> None:
    """Take engines away, idle ones first and then the youngest, and start others on the GPUs that are free."""
    fleet.engines = [each for each in fleet.engines if each.leaves_at > fleet.now]
    for model in MODELS:
        too_many = len(fleet.of(model)) - targets[model.name]
        for each in sorted(fleet.of(model), key=_goes_first)[: max(0, too_many)]:
            each.leaves_at = fleet.now + (DRAIN_S if each.works else 0.0)
    fleet.engines = [each for each in fleet.engines if each.leaves_at > fleet.now]
    for model in MODELS:
        for _ in range(targets[model.name] - len(fleet.of(model))):
            if model.gpus <= fleet.free:
                fleet.engines.append(Engine(model, fleet.now + START_S, fleet.now))


def _goes_first(engine: Engine) -> tuple[bool, float]:
    return engine.works, -engine.ready_at if engine.works else engine.idle_since


def _work(fleet: Fleet, model: Model) -> float:
    """Let the ready engines of a model work for a step; return the seconds that they did."""
    ready = [each for each in fleet.of(model) if each.ready_at <= fleet.now]
    can_s = STEP_S * len(ready)
    for batch in fleet.left(model):
        does_s = min(batch.left_s, can_s)
        batch.left_s -= does_s
        can_s -= does_s
    did_s = STEP_S * len(ready) - can_s
    used = math.ceil(did_s / STEP_S)
    for number, each in enumerate(ready):
        each.works = number < used
        if each.works:
            each.idle_since = fleet.now + STEP_S
    return did_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=int, default=20)
    parser.add_argument("--first", type=int, default=100, help="seed of the first day")
    parser.add_argument("--gpus", type=int, default=24)
    parser.add_argument("--load", type=float, default=0.7, help="work of a day, as a share of all GPUs' time")
    given = parser.parse_args()
    ways: dict[str, Way] = {
        "fleet": by_fleet(),
        "fleet, 10 min": by_fleet(switch_s=600.0),
        "fleet, patient": by_fleet(seconds_per_engine=43_200.0, idle_s=30.0, switch_s=3600.0),
        "fixed": fixed({model.name: model.share for model in MODELS}),
        **{f"queue {each} s, {cool} s": by_queue(each, cool) for each in TARGETS_S for cool in COOLDOWNS_S},
    }

    def batches() -> list[Batch]:
        found = [each for number in range(given.days) for each in day(given.first + number, given.gpus, given.load)]
        for each in found:
            each.comes_at -= given.first * DAY_S
            each.due_at -= given.first * DAY_S
        return found

    every = batches()
    work = sum(batch.work_s * batch.model.gpus for batch in every) / 3600 / given.days
    print(
        f"{given.days} days, seeds from {given.first}; {given.gpus} GPUs, load {given.load}; {len(every)} batches, "
        f"{work:.1f} GPU hours of work a day"
    )
    for name, way in ways.items():
        met, hours, worked = run(batches(), given.gpus, way)
        print(
            f"{name:20} {met / len(every):7.2%} of the deadlines met, {hours / given.days:6.1f} GPU hours a day, "
            f"{worked / given.days:6.1f} of them at work ({worked / hours:.1%})",
            flush=True,
        )


if __name__ == "__main__":
    main()
