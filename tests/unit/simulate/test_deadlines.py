"""Random windows and loads in the simulator: as many deadlines are met as by earliest deadline first, at full speed."""

import numpy as np
import pytest

from engine_ext.arrays import Column, Floats
from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import EngineModel
from engine_ext.costs.hardware import Machine, hardware
from engine_ext.costs.model_shape import preset
from engine_ext.plan.prompts import Prompts
from engine_ext.simulate.policies import Work, fresh_engine, prepare, run_scan
from engine_ext.simulate.stock import run_stock

pytestmark = pytest.mark.slow

COST = CostModel(preset("llama-3-8b"), Machine(hardware("a100-80gb")))
MODEL = EngineModel.of(COST)
BATCHES = 8


def drawn(seed: int) -> tuple[Work, Column]:
    """Batches of all densities, some with a shared prefix, and the batch of each request."""
    generator = np.random.default_rng(seed)
    segments: list[list[tuple[str, int]]] = []
    output: list[int] = []
    batch: list[int] = []
    for number in range(BATCHES):
        shared, own = int(generator.integers(0, 800)), int(generator.integers(20, 2500))
        answer = float(generator.uniform(1, 6.5))
        for k in range(int(generator.integers(20, 800))):
            segments.append([(f"shared {number}", shared + 1), (f"{number} {k}", own)])
            output.append(int(generator.lognormal(answer, 0.5)) + 1)
            batch.append(number)
    caps = np.full(len(output), 4096, dtype=np.int64)
    outputs, batches = np.array(output, dtype=np.int64), np.array(batch, dtype=np.int64)
    prompts = Prompts.of_segments(segments)
    return prepare(prompts, outputs, COST, caps, batches, seed=seed, foretold=False), batches


def met(ended_s: Floats, due_s: Floats, batch: Column) -> int:
    """Return how many batches have ended before their deadlines."""
    return sum(bool(np.all(ended_s[batch == each] <= due_s[batch == each])) for each in range(BATCHES))


def earliest_deadline_first(work: Work, due_s: Floats) -> Floats:
    engine, cache = fresh_engine(work, MODEL)
    order = np.argsort(due_s, kind="stable")
    run_stock(engine, cache, MODEL.numbers, order, work.estimates.mean, 512, 0.6, False)
    return engine.ended_s


@pytest.mark.parametrize("load", [0.5, 1.0, 2.0])
def test_deadlines_are_met_as_by_earliest_deadline_first_and_cost_little(load: float) -> None:
    ours, theirs, slowed = 0, 0, []
    for seed in range(8):
        work, batch = drawn(seed)
        plain, _, _ = run_scan(work, MODEL, seed)
        plain_s = float(plain.totals[0].seconds)
        windows = np.random.default_rng(seed).uniform(0.05, 2.0, BATCHES) * plain_s / load
        due_s = windows[batch]

        engine, _, _ = run_scan(work, MODEL, seed, due_s=due_s)

        assert np.all(engine.ended_s > 0)
        ours += met(engine.ended_s, due_s, batch)
        theirs += met(earliest_deadline_first(work, due_s), due_s, batch)
        slowed.append(float(engine.totals[0].seconds) / plain_s)
    print(f"load {load}: {ours} met, {theirs} by earliest deadline first, {np.mean(slowed):.3f} times as long")

    assert ours >= theirs
    assert np.mean(slowed) <= 1 / 0.97
