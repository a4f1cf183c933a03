"""python -m engine_ext.plan.warm_up: compile what a scan needs, so that an engine's first step does not wait for it."""

import numpy as np

from engine_ext.plan.cost import CostModel
from engine_ext.plan.hardware import Machine, hardware
from engine_ext.plan.live_scan import FEWEST, LiveScan
from engine_ext.plan.model_shape import preset
from engine_ext.plan.scan_state import StepCosts


def main() -> None:
    """A few requests through every function that an engine calls; what is compiled is kept on disk."""
    cost = CostModel(preset("llama-3-8b"), Machine(hardware("h200")))
    scan = LiveScan(cost, StepCosts.of(cost, 1_000_000))
    prompts = np.random.default_rng(0).integers(0, 1 << 17, (4 * FEWEST, 64), np.uint32)
    for key, prompt in enumerate(prompts):
        prompt[:8] = key % 2
        scan.add(key, prompt, 1000)
    first, second, third, *_ = scan.decide(0, 0, 0, 0, 0, FEWEST).admitted
    for key in (first, second, third):
        scan.prefilled(key)
    scan.finished(first, 10)
    scan.retracted(second, 10)
    scan.add(-1, prompts[0], 1000)
    scan.take_back(-1)
    last, *_ = scan.decide(1000, 1000, 1, 0, 1, FEWEST).admitted
    scan.held(last)
    scan.dropped(third, 20)


if __name__ == "__main__":
    main()
