"""python -m engine_ext.plan.warm_up: compile what a scan needs, so that an engine's first step does not wait for it."""

import numpy as np

from engine_ext.plan.cost import CostModel
from engine_ext.plan.engine_model import Clock, EngineModel, compute_time, step_time
from engine_ext.plan.hardware import Machine, hardware
from engine_ext.plan.lengths import UNKNOWN
from engine_ext.plan.live_scan import LiveScan
from engine_ext.plan.model_shape import preset
from engine_ext.plan.replan import FEWEST
from engine_ext.plan.scan_state import StepCosts


def main() -> None:
    """Requests of few prefixes and of all lengths through what an engine calls; what is compiled is kept on disk."""
    cost = CostModel(preset("llama-3-8b"), Machine(hardware("h200")))
    scan, generator = LiveScan(cost, StepCosts.of(cost, 1_000_000)), np.random.default_rng(0)
    running: list[int] = []
    for key in range(6 * FEWEST):
        prompt = generator.integers(0, 1 << 17, 64 + key % 5 * 100, np.uint32)
        prompt[:8] = key % 3
        scan.add(key, prompt, 4000, (UNKNOWN, 2, 3000)[key // 3 % 3])
        if key % FEWEST != 0 or len(scan) == 0:
            continue
        admitted = scan.decide(1000, 1000, len(running), 0, 1, 5).admitted
        for each in admitted[1:]:
            scan.prefilled(each)
            running.append(each)
        for each in admitted[:1]:
            scan.held(each)
        for change in (scan.finished, scan.retracted, scan.dropped):
            if len(running) > 1:
                change(running.pop(0), 10)
    model = EngineModel.of_steps(cost, Clock.MIXED).array
    step_time(model, compute_time(model, 10, 20.0), 1e-3)
    scan.add(-1, generator.integers(0, 1 << 17, 64, np.uint32), 1000)
    scan.take_back(-1)


if __name__ == "__main__":
    main()
