"""Plays random scenes in SGLang on an emulated device, and compares each step with a simulated engine.

python -m tests.engine.step.scenes [--scenes 200] [--seed 0]
"""

import argparse
import pickle
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engine.bench_engine import Arriving, BenchEngine
from benchmarks.engine.tuning import MOST_TOKENS, Tuning
from benchmarks.engine_process import EngineProcess
from engine_ext.coserve.slo import DEFAULT, NAMES
from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import Clock, EngineModel
from engine_ext.costs.hardware import Machine, hardware
from engine_ext.costs.model_shape import preset
from engine_ext.errors import EngineError
from engine_ext.step.decide import decide
from service.demo.prompts import corpus
from service.demo.tiny import ensure_tiny_model
from tests.engine.step.frames import RECORD, Frame
from tests.engine.step.mirror import Mirror

COST = CostModel(preset("llama-3-8b"), Machine(hardware("h200")))
CAPACITY = 6000  # tokens of KV cache: few, so that requests make way for each other
BATCH, LONGEST_ONLINE = 40, 1500  # requests; prompt tokens
LASTS_S = 2.0
DIFFERS = {"slots"}  # fields of the view: any number of requests may run on a simulated engine


@dataclass(frozen=True, slots=True)
class Scene:
    """A small batch, with shared prefixes, beside online requests."""

    batch: list[list[int]]
    outputs: list[int]
    online: list[Arriving]
    tuning: Tuning

    @classmethod
    def of(cls, seed: int) -> "Scene":
        generator = np.random.default_rng(seed)

        def between(low: int, high: int) -> int:
            return int(generator.integers(low, high))

        def tokens(count: int) -> list[int]:
            return generator.integers(10, 900, count).tolist()

        prefixes, longest = [tokens(between(50, 400)) for _ in range(3)], between(200, 2500)
        batch = [
            [*(prefixes[between(0, 3)] if between(0, 2) else []), *tokens(between(20, longest))] for _ in range(BATCH)
        ]
        times = np.sort(generator.uniform(0.0, LASTS_S, between(3, 25))).tolist()
        some = NAMES if between(0, 2) else (DEFAULT,)
        online = [
            Arriving(at_s, tokens(between(20, LONGEST_ONLINE)), between(2, 120), some[between(0, len(some))])
            for at_s in times
        ]
        tuning = Tuning(
            chunk=MOST_TOKENS,
            ratio=float(generator.uniform(0.2, 0.9)),
            tpot_s=float(generator.choice([0.006, 0.01, 0.05])),
            ttft_s=float(generator.choice([0.05, 1.0])),
            stronger=float(generator.choice([0.5, 1.0])),
            prompt_tokens=between(2, 20) * 64,
            until_s=LASTS_S,
        )
        return cls(batch, [between(2, 300) for _ in batch], online, tuning)

    def mirror(self) -> Mirror:
        """Return a simulated engine for its requests."""
        names = [f"bench-{n}" for n in range(len(self.batch))] + [f"online-{n}" for n in range(len(self.online))]
        prompts = self.batch + [each.prompt for each in self.online]
        outputs = self.outputs + [each.output for each in self.online]
        model = EngineModel.of(COST, Clock.MIXED).numbers
        classes, slos = self.tuning.classes, [NAMES.index(each.slo) for each in self.online]
        return Mirror(names, prompts, outputs, CAPACITY, model, classes, slos, self.tuning.prompt_tokens)


@dataclass(slots=True)
class Compared:
    """Counts the `steps` of scenes, and those whose plan was carried out on both engines (`applied`).

    `admitted`, `parked`, `yielded`, `rested`, `made_way`: steps in which requests of the batch were, or did. `no_room`:
    steps in which an online prompt waited and none was computed. `differences`: what differed.
    """

    steps: int = 0
    applied: int = 0
    admitted: int = 0
    parked: int = 0
    yielded: int = 0
    rested: int = 0
    made_way: int = 0
    no_room: int = 0
    differences: list[str] = field(default_factory=list[str])


@contextmanager
def scene_engine(model: Path, folder: Path) -> Generator[EngineProcess[BenchEngine], None, None]:
    """Run an engine that writes its steps to `folder`."""
    make = partial(
        BenchEngine.emulated, str(model), COST, CAPACITY, 1 << 13, more_hooks=("tests.engine.step.recording",)
    )
    with EngineProcess(make, folder / "engine.log", {RECORD: str(folder / "steps")}) as engine:
        yield engine


def compare(engine: EngineProcess[BenchEngine], folder: Path, seed: int, found: Compared) -> None:
    """Play a scene, and add to `found` what its steps did."""
    record, scene = folder / "steps", Scene.of(seed)
    record.unlink(missing_ok=True)
    try:
        engine.do(BenchEngine.run_beside, scene.tuning, scene.batch, scene.outputs, scene.online)
    except EngineError as error:
        if "the batch ended" not in str(error):  # all that matters here is written down by then
            raise
    mirror = scene.mirror()
    for number, frame in enumerate(_frames(record)):
        if not any(each.is_aborted for each in frame.held.values()):  # as at the end of a run; nobody aborts there
            _compare_step(mirror, frame, f"scene {seed}, step {number}", found)


def _compare_step(mirror: Mirror, frame: Frame, name: str, found: Compared) -> None:
    assert frame.state is not None
    assert frame.memory is not None
    assert frame.plan is not None
    mirror.show(frame)
    view = mirror.look()
    plan, _ = decide(frame.state, frame.memory, view, mirror.ours.rests[: len(view.kv)])

    def expect(what: str, real: Any, simulated: Any) -> None:
        if not np.array_equal(np.array(real, dtype=object), np.array(simulated, dtype=object)):
            found.differences.append(f"{name}, {what}: {real} in SGLang, {simulated} simulated")

    for field_name, real in frame.view._asdict().items():
        if field_name not in DIFFERS:
            expect(field_name, real, getattr(view, field_name))
    expect("plan", frame.plan, plan)
    found.steps += 1
    found.admitted += plan.admitted > 0
    found.parked += plan.parks
    found.yielded += plan.yields
    found.rested += plan.left_out > 0
    if len(frame.admitted) < plan.admitted or not mirror.is_exact(frame):
        return  # a request waits for its twin's prefix, or half a node is cached
    became = mirror.apply(frame, view, plan)
    found.applied += 1
    found.made_way += len(became.made_way) > plan.parks
    found.no_room += view.online.waiting > 0 and not any(each.startswith("online") for each in became.computed)
    expect("who rests", set(frame.rests), became.rests)
    expect("who made way", set(frame.made_way), became.made_way)
    if frame.is_asked or not became.computed:  # else it is the turn of those that decode, which nobody simulates
        expect("prompt tokens", frame.computed, became.computed)


def _frames(record: Path) -> Generator[Frame, None, None]:
    with record.open("rb") as file:
        while True:
            try:
                yield pickle.load(file)
            except EOFError:
                return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenes", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given, found = parser.parse_args(), Compared()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with scene_engine(ensure_tiny_model(folder / "model", corpus()), folder) as engine:
            for seed in range(given.seed, given.seed + given.scenes):
                known = len(found.differences)
                compare(engine, folder, seed, found)
                print(f"scene {seed}: {found.steps} steps so far, {len(found.differences)} differences", flush=True)
                print("".join(f"{each}\n" for each in found.differences[known:]), end="", flush=True)
    counts = ", ".join(f"{name} {getattr(found, name)}" for name in Compared.__slots__ if name != "differences")
    print(f"{counts}; {len(found.differences)} differences")
    sys.exit(bool(found.differences))


if __name__ == "__main__":
    main()
