"""Measure how well the predictor of step times does on steps of real SGLang on this machine.

python -m benchmarks.predictor [--requests 1000] [--after 1000]

Real SGLang runs a batch of the demo's model, SYNTHETIC prompts, with online requests beside it, and writes what each
step did and how long it took. The cost model is fitted to the first `--after` steps, as `batchweave calibrate` does.
Then a new predictor goes through all steps: it predicts each, and learns from what the step really took. Prints the
error as a share of a step's time, over the steps after the first `--after`, and for comparison that of the best linear
fit to these steps in hindsight. Other work on the machine makes steps longer in ways that nothing can predict, so run
nothing beside it.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from benchmarks.engine.bench_engine import BenchEngine
from benchmarks.engine.tuning import Tuning
from engine_ext.arrays import Floats
from engine_ext.coserve.predictor import Load, new_predictor, observe, predict
from engine_ext.costs.calibrate import Profile, calibrate
from engine_ext.costs.engine_model import Clock
from engine_ext.plugin.options import Overlap
from engine_ext.plugin.worker.cpu_defaults import CPU_DEFAULTS
from service.demo.prompts import corpus
from service.demo.tiny import ensure_tiny_model
from service.estimates.model_costs import planning_costs
from service.workloads.profile import read_profile

CHUNK = 512
CAPACITY = 12_000


async def run(engine: BenchEngine, requests: int) -> None:
    """Run a batch, and one online request after the other for as long as it runs."""
    random = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return random.integers(10, 900, count).tolist()

    prompts = [tokens(int(count)) for count in random.integers(10, 600, requests)]
    # Bounds that a CPU can keep with a batch beside.
    tuning = Tuning(None, CHUNK, mixed=False, ttft_s=60.0, tpot_s=10.0)
    batch = asyncio.create_task(engine.run(tuning, prompts, random.integers(4, 160, requests).tolist()))
    number = 0
    while not batch.done():
        await engine.ask(f"online-{number}", tokens(50 if number % 4 else 700), 20)
        number += 1
    await batch


def errors(steps: Mapping[str, Floats], after: int) -> tuple[Floats, Floats]:
    """Return the errors of the predictions and of the best linear fit, as shares of what each step took.

    `steps`: columns as in `Profile`. Both are float64 [steps - after].
    """
    fitted = calibrate(Profile(**{name: column[:after] for name, column in steps.items()}), Clock.SEQUENTIAL)
    predictor, expected = new_predictor(fitted.model(CAPACITY, Clock.SEQUENTIAL).numbers), list[float]()
    prompts = np.minimum(1, steps["prefill_tokens"])  # the file does not say how many
    columns = (steps["prefill_tokens"], steps["quadratic"], prompts, steps["decoding"], steps["kv_tokens"])
    for *numbers, seconds in zip(*columns, steps["seconds"], strict=True):
        tokens, quadratic, count, decoding, kv = numbers
        load = Load(int(tokens), float(quadratic), int(count), int(decoding), int(kv))
        expected.append(predict(predictor, load))
        observe(predictor, load, float(seconds))
    rest, seconds = slice(after, None), steps["seconds"]
    features = np.stack([np.ones(len(seconds)), *columns, columns[3] ** 2], axis=1)[rest] / seconds[rest, None]
    best = features @ np.linalg.lstsq(features, np.ones(len(features)), rcond=None)[0]
    return np.array(expected)[rest] / seconds[rest] - 1.0, best - 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000, help="of the batch (default 1000)")
    parser.add_argument("--after", type=int, default=1000, help="steps to learn from first (default 1000)")
    given = parser.parse_args()
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    with tempfile.TemporaryDirectory() as folder:
        model_path = str(ensure_tiny_model(Path(folder) / "demo", corpus()))
        costs, steps = planning_costs(model_path, "h200", 1), Path(folder) / "steps.jsonl"
        small = {**CPU_DEFAULTS, "max_total_tokens": CAPACITY, "chunked_prefill_size": CHUNK}
        engine = BenchEngine.real(model_path, costs, Overlap.NONE, small, str(steps))
        loop.run_until_complete(run(engine, given.requests))
        engine.close()
        predicted, best = errors(read_profile(steps), given.after)
    print(f"of {len(predicted):,} steps after the first {given.after:,}:")
    for name, found in (("predictor", np.abs(predicted)), ("best fit", np.abs(best))):
        print(f"{name}: mean error {found.mean():.1%}, 99% of the steps under {np.quantile(found, 0.99):.1%}")


if __name__ == "__main__":
    main()
