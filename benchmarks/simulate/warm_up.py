"""python -m benchmarks.simulate.warm_up: compiles the loops of the simulator and of the rivals, for those who test."""

from dataclasses import replace

import numpy as np

from benchmarks.simulate.batches import simulate
from benchmarks.simulate.beside import POLICIES, run
from benchmarks.simulate.pair import POOLED, Pair, run_pair
from engine_ext.coserve.slo import SloClass
from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import Clock, EngineModel
from engine_ext.costs.hardware import Machine, hardware
from engine_ext.costs.model_shape import preset
from engine_ext.plan.prompts import Prompts
from engine_ext.simulate.arrivals import at_rate
from engine_ext.simulate.measured import Settings
from engine_ext.simulate.policies import prepare
from engine_ext.simulate.traffic import Traffic


def main() -> None:
    """Run a few requests through each loop."""
    count = 8
    prompts = Prompts.of_segments([[("shared", 16), (k, 16)] for k in range(count)])
    caps = np.full(count, 64, dtype=np.int64)
    model = EngineModel(1e-6, 1e-8, 0.0, 1e-4, 10_000)
    cost = CostModel(preset("llama-3-8b"), Machine(hardware("h200")))
    for policy in ("fcfs", "blendserve", "batchweave"):
        simulate(prepare(prompts, np.full(count, 8, dtype=np.int64), cost, caps), model, policy)
    arrivals = at_rate(np.arange(4, dtype=np.float64), 1.0, 4.0, np.random.default_rng(0))
    both = Prompts.of_segments([[(f"{k}", 16)] for k in range(count + len(arrivals))])
    answers = np.full(count + len(arrivals), 8, dtype=np.int64)
    beside = replace(model, clock=Clock.MIXED)
    for policy in POLICIES:
        run(Traffic.of(both, answers, caps, arrivals), cost, beside, policy, Settings(), SloClass())
    for policy in POOLED:
        run_pair(Pair.of(both, answers, caps, arrivals), cost, beside, policy, Settings(), SloClass())


if __name__ == "__main__":
    main()
