"""Measure how long the dual scan takes to decide a step while 4,000 requests run and 400,000 wait.

python -m benchmarks.scan_steps [--running 4000] [--waiting 400000] [--backlog 20000]

The lengths are SYNTHETIC and known from a sample. A counter of tokens stands in for the engine, because only decisions
are timed, each from Python. Then it measures an engine that plans its own backlog in a thread (SYNTHETIC too: half of
the prompts have one of 57 prefixes): all calls of its scan in a step of 8 ms, and how long a plan takes.
"""

import argparse
import heapq
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from engine_ext.coserve.limit import NOT_PROFILED
from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import Clock, EngineModel
from engine_ext.costs.hardware import Machine, hardware
from engine_ext.costs.model_shape import preset
from engine_ext.plan.groups import Groups
from engine_ext.plan.lengths import see
from engine_ext.scan.decide import DualScan
from engine_ext.scan.events import FINISHED, PREFILLED, Event
from engine_ext.scan.state import Backlog, StepCosts
from engine_ext.scan.tuning import PATIENCE
from engine_ext.step.decide import decide
from engine_ext.step.live import LiveScan
from engine_ext.step.memory import new_memory
from engine_ext.step.view import batches_alone

WARM_UP = 2_000
STEPS = 6_000
KINDS = 100
PLANS = 12
LIVE_STEPS = 2_500
STEP_S = 0.008
COST = CostModel(preset("llama-3-8b"), Machine(hardware("h200")))
MEMORY = new_memory(EngineModel.of_steps(COST, Clock.MIXED).numbers, 400_000, NOT_PROFILED)
NOBODY_RESTS = np.zeros(0, dtype=np.bool_)


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
    unknown, caps = np.full(waiting, -1), np.full(waiting, 32_768)
    left, right = np.arange(half), np.arange(waiting - 1, half - 1, -1)
    # Reading the weights takes as long as reading the cache, so the right end gets as much of the cache as it may have.
    costs = StepCosts.of(COST, capacity, 16_384)._replace(weights_s=capacity * COST.read_s_per_token)
    scan = DualScan.of(Backlog(prompt, prompt, unknown, caps, left, right, groups, seen), costs)
    ends: list[tuple[int, int]] = []
    events: list[Event] = []
    used = decoding = 0
    seconds: list[float] = []
    held: list[int] = []
    for step in range(WARM_UP + STEPS):
        started = time.perf_counter()
        if events:
            scan.tell(np.array(events))
            events.clear()
        found, _ = decide(scan.state, MEMORY, batches_alone(used, used, decoding, 0), NOBODY_RESTS)
        seconds.append(time.perf_counter() - started)
        for request in scan.state.admitted[: found.admitted].tolist():
            events.append((PREFILLED, request, 0))
            heapq.heappush(ends, (step + 1 + int(output[request]), request))
            used += int(prompt[request])
            decoding += 1
        used += decoding
        while ends and ends[0][0] <= step + 1:
            _, request = heapq.heappop(ends)
            events.append((FINISHED, request, int(output[request])))
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


class Engine:
    """Counts tokens for a LiveScan whose backlog stays as long as it is: a request comes for each that begins."""

    def __init__(self, scan: LiveScan, backlog: int) -> None:
        self.scan, self.backlog, self.generator = scan, backlog, np.random.default_rng(0)
        self.prefixes = self.generator.integers(0, 1 << 17, (57, 400), np.uint32)
        self.prompts: dict[int, int] = {}
        self.rest: dict[int, int] = {}
        self.running: dict[int, int] = {}
        self.admitted: list[int] = []
        self.fill()

    def fill(self) -> None:
        while len(self.scan) < self.backlog:
            key, own = len(self.rest), self.generator.integers(0, 1 << 17, int(self.generator.integers(20, 400)))
            is_dense = key % 2 == 1
            prompt = np.concatenate([self.prefixes[key % 57], own]) if is_dense else own
            output = self.generator.integers(2, 40) if is_dense else self.generator.lognormal(6.0, 0.8) + 1
            self.prompts[key], self.rest[key] = len(prompt), int(output)
            self.scan.add(key, prompt.astype(np.uint32), 4096, kind=int(is_dense))

    def step(self, now: float) -> float:
        """Run a step, and return the seconds of all calls of the scan."""
        used = sum(self.prompts[key] + tokens for key, tokens in self.running.items())
        begun = [key for key in self.admitted if key in self.running]
        ended = [key for key, tokens in self.running.items() if tokens + 1 >= self.rest[key]]
        started = time.perf_counter()
        for key in begun:
            self.scan.stored(key)
        for key in ended:
            self.scan.finished(key, self.rest[key])
        _, self.admitted = self.scan.decide(MEMORY, batches_alone(used, used, len(self.running), 0), NOBODY_RESTS, now)
        for key in self.admitted:
            self.scan.prefilled(key, stored=False)
        seconds = time.perf_counter() - started
        self.running = {key: tokens + 1 for key, tokens in self.running.items() if key not in ended}
        self.running |= dict.fromkeys(self.admitted, 0)
        return seconds


def live(backlog: int) -> dict[str, float]:
    """Time the steps of an engine whose plans are made in a thread; requests come sixteen steps apart."""
    with ThreadPoolExecutor(1) as thread:
        engine = Engine(LiveScan(COST, StepCosts.of(COST, 400_000), executor=thread), backlog)
        seconds: list[float] = []
        for step in range(LIVE_STEPS):
            began = time.perf_counter()
            seconds.append(engine.step(step * STEP_S))
            if step % 16 == 0:
                engine.fill()
            time.sleep(max(0.0, STEP_S - (time.perf_counter() - began)))
    timed = np.array(seconds[LIVE_STEPS // 5 :]) * 1e3
    return {
        "live_running": float(len(engine.running)),
        "live_plans": float(engine.scan.plans),
        "live_mean_ms": float(timed.mean()),
        "live_p99_ms": float(np.quantile(timed, 0.99)),
        "live_worst_ms": float(timed.max()),
    }


def plan(backlog: int) -> dict[str, float]:
    """Time plans of such a backlog, except the first, which loads the compiled code."""
    engine, seconds = Engine(LiveScan(COST, StepCosts.of(COST, 400_000)), backlog), list[float]()
    for step in range(PLANS * PATIENCE):
        before, took = engine.scan.plans, engine.step(step * STEP_S)
        if engine.scan.plans > before:
            seconds.append(took)
        engine.fill()
    return {"backlog": float(backlog), "plan_ms": 1e3 * float(np.median(seconds[1:]))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=4_000)
    parser.add_argument("--waiting", type=int, default=400_000)
    parser.add_argument("--backlog", type=int, default=20_000)
    given = parser.parse_args()
    found = measure(given.running, given.waiting) | live(given.backlog) | plan(given.backlog)
    for name, value in found.items():
        print(f"{name:20} {value:,.4f}")


if __name__ == "__main__":
    main()
