"""Measure how long it takes to plan a window of a scaled-up real mix, and how that time grows with the window.

python -m benchmarks.planner DATA [--requests 1000000] [--plot docs/planner.png]

Runs on one core, each size in its own process, so that its peak memory is its own. Sizes double from 10,000.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks import mixes
from engine_ext.costs.cost import CostModel
from engine_ext.costs.hardware import Machine, hardware
from engine_ext.costs.model_shape import preset
from engine_ext.plan.prompts import Prompts
from engine_ext.plan.window import Outputs, Shape, plan_window

MIX = "h200-2"
TOKENS_PER_REQUEST = 500
SAMPLE = 0.01


def token_prompts(data: Path, requests: int) -> tuple[Prompts, np.ndarray]:
    """Repeat the mix until there are enough requests; shared segments get equal token ids, all others random ones."""
    rows = mixes.make(data, MIX)
    mean = sum(size for row in rows for _, size in row.segments) / len(rows)
    shrink = TOKENS_PER_REQUEST / mean
    generator = np.random.default_rng(0)
    contents: dict[str, np.ndarray] = {}
    parts: list[np.ndarray] = []
    lengths: list[int] = []
    outputs: list[int] = []
    for number in range(requests):
        row, copy = rows[number % len(rows)], number // len(rows)
        length = 0
        for name, size in row.segments:
            size = max(1, round(size * shrink))
            own = "/" not in name or not (name.endswith("system") or "/header" in name or "/example" in name)
            if own:
                content = generator.integers(0, 128_000, size, dtype=np.uint32)
            else:
                key = f"{copy if 'example' in name else 0}/{name}"
                if key not in contents:
                    contents[key] = generator.integers(0, 128_000, size, dtype=np.uint32)
                content = contents[key]
            parts.append(content)
            length += size
        lengths.append(length)
        outputs.append(row.output_tokens)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Prompts(np.concatenate(parts), starts), np.array(outputs, dtype=np.int64)


def measure(data: Path, requests: int) -> dict[str, float]:
    prompts, outputs = token_prompts(data, requests)
    cost = CostModel(preset("llama-3-8b"), Machine(hardware("h200")))
    sampled = np.sort(np.random.default_rng(1).choice(requests, max(1, int(SAMPLE * requests)), replace=False))
    known = np.full(requests, -1)
    known[sampled] = outputs[sampled]
    found = Outputs(np.full(requests, 32_768), known, None, sampled, outputs[sampled])
    plan_window(Prompts.of([[1, 2], [1, 3]]), Outputs.of_known(np.array([1, 2])), cost)  # compile
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    started = time.perf_counter()
    plan = plan_window(prompts, found, cost, shape=Shape(replicas=8))
    return {
        "requests": requests,
        "prompt_tokens": plan.prompt_tokens,
        "sharing": plan.load.sharing,
        "sharing_kept": plan.scan.sharing_kept,
        "planning_s": time.perf_counter() - started,
        "peak_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
        "rss_before_gb": before / 1e9,
    }


def draw(found: list[dict[str, float]], path: Path) -> None:
    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    n = np.array([each["requests"] for each in found])
    seconds = np.array([each["planning_s"] for each in found])
    shape = n * np.log2(n)
    axes.loglog(n, seconds, "o-", label="measured, one core")
    axes.loglog(n, shape * seconds[-1] / shape[-1], ":", color="grey", label="n log n through the last point")
    axes.set_xlabel("requests, 500 prompt tokens each")
    axes.set_ylabel("seconds to plan")
    axes.legend()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with lengths/, text/ and tokenizers/")
    parser.add_argument("--requests", type=int, default=1_000_000, help="the largest window, in requests")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.data, given.requests)))
        return
    sizes = [given.requests]
    while sizes[-1] >= 20_000:
        sizes.append(sizes[-1] // 2)
    found: list[dict[str, float]] = []
    for size in reversed(sizes):
        command = [sys.executable, "-m", "benchmarks.planner", str(given.data), "--requests", str(size), "--one"]
        one_core = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
        found.append(json.loads(subprocess.run(command, check=True, capture_output=True, env=one_core).stdout))
        print({key: round(value, 4) for key, value in found[-1].items()}, flush=True)
    if given.plot:
        draw(found, given.plot)


if __name__ == "__main__":
    main()
