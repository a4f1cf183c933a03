"""Measure how long the dual scan takes to decide a step while 4,000 requests run and 400,000 wait.

python -m benchmarks.scan_steps [--running 4000] [--waiting 400000] [--backlog 20000]

The lengths are SYNTHETIC and known from a sample. A counter of tokens stands in for the engine, because only decisions
are timed, each from Python. Then it measures how long an engine takes to plan its own backlog: prompts of 500 tokens,
of which 400 are one of 57 prefixes.
"""

import argparse
import heapq
import time

import numpy as np

from engine_ext.costs.cost import CostModel
from engine_ext.costs.hardware import Machine, hardware
from engine_ext.costs.model_shape import preset
from engine_ext.plan.groups import Groups
from engine_ext.plan.lengths import see
from engine_ext.scan.decide import DualScan
from engine_ext.scan.live import LiveScan
from engine_ext.scan.state import Backlog, StepCosts

WARM_UP = 2_000
STEPS = 6_000
KINDS = 100
PLANS = 12


def measure(running: int, waiting: int) -> dict[str, float]:
    generator = np.random.default_rng(0)
    half = waiting // 2
    prompt = np.concatenate([generator.integers(200, 1500, half), generator.integers(50, 300, waiting - half)])
    output = np.concatenate(
        [generator.integers(2, 40, half), generator.lognormal(6.5, 0.8, waiting - half).astype(np.int64) + 1]
    )
    kind = np.concatenate(
        [generator.integers(0, KINDS // 2, half), generator.integers(KINDS // 2, KINDS, waiting - half)]
    )
    groups = Groups.unlike(kind + 1, np.concatenate([[-1], np.zeros(KINDS, dtype=np.int64)]))
    sample = generator.choice(waiting, waiting // 100, replace=False)
    seen = see(groups, sample, output[sample], np.ones(len(sample), dtype=np.bool_))
    # The cache limits how many requests run, so its size is chosen for the wanted number.
    capacity = int(running * (prompt[half:].mean() + output[half:].mean()))
    cost = CostModel(preset("llama-3-8b"), Machine(hardware("h200")))
    unknown, caps = np.full(waiting, -1), np.full(waiting, 32_768)
    left, right = np.arange(half), np.arange(waiting - 1, half - 1, -1)
    # Reading the weights takes as long as reading the cache, so the right end gets as much of the cache as it may have.
    costs = StepCosts.of(cost, capacity, 16_384)._replace(weights_s=capacity * cost.read_s_per_token)
    scan = DualScan.of(Backlog(prompt, prompt, unknown, caps, left, right, groups, seen), costs)
    ends: list[tuple[int, int]] = []
    used = decoding = 0
    seconds: list[float] = []
    held: list[int] = []
    for step in range(WARM_UP + STEPS):
        started = time.perf_counter()
        found = scan.decide(used, used, decoding, 0)
        seconds.append(time.perf_counter() - started)
        for request in found.admitted.tolist():
            scan.prefilled(request)
            heapq.heappush(ends, (step + 1 + int(output[request]), request))
            used += int(prompt[request])
            decoding += 1
        used += decoding
        while ends and ends[0][0] <= step + 1:
            _, request = heapq.heappop(ends)
            scan.finished(request, int(output[request]))
            used -= int(prompt[request] + output[request])
            decoding -= 1
        held.append(decoding)
    timed = np.array(seconds[WARM_UP:]) * 1e3
    return {
        "running": float(np.mean(held[WARM_UP:])),
        "waiting_at_the_end": float(scan.waiting),
        "mean_ms": float(timed.mean()),
        "p99_ms": float(np.quantile(timed, 0.99)),
        "worst_ms": float(timed.max()),
    }


def plan_again(backlog: int) -> dict[str, float]:
    """Time the plans of a LiveScan, except the first, which loads the compiled code."""
    generator = np.random.default_rng(0)
    prefixes, rests = (generator.integers(0, 1 << 17, (n, size), np.uint32) for n, size in ((57, 400), (backlog, 100)))
    cost = CostModel(preset("llama-3-8b"), Machine(hardware("h200")))
    scan = LiveScan(cost, StepCosts.of(cost, 845_000))
    for key in range(backlog):
        scan.add(key, np.concatenate([prefixes[key % 57], rests[key]]), 4096)
    seconds: list[float] = []
    for key in range(PLANS):
        started = time.perf_counter()
        scan.decide(0, 0, 0, 0, 0, 0)
        seconds.append(time.perf_counter() - started)
        scan.take_back(key)  # so that the next decision plans again
    return {"backlog": float(backlog), "plan_ms": 1e3 * float(np.median(seconds[1:]))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=4_000)
    parser.add_argument("--waiting", type=int, default=400_000)
    parser.add_argument("--backlog", type=int, default=20_000)
    given = parser.parse_args()
    found = measure(given.running, given.waiting) | plan_again(given.backlog)
    for name, value in found.items():
        print(f"{name:20} {value:,.4f}")


if __name__ == "__main__":
    main()
