"""Say what the simulator expects of a comparison on a GPU: `python -m benchmarks.gpu.expected DATA [--gpu h100]`.

For each way in which an engine's steps may share their time: SGLang's fcfs and input sorted by prefix, at the best
settings that the simulator finds, and batchweave, which knows no answer's length. Nothing here was measured on a GPU.
"""

import argparse
from pathlib import Path

import numpy as np

from benchmarks.emulated import predicted
from benchmarks.gpu import workloads
from benchmarks.gpu.plan import ROWS
from engine_ext import warm_up
from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import Clock, EngineModel
from engine_ext.costs.hardware import PRESETS, Machine, hardware
from engine_ext.costs.model_shape import preset
from engine_ext.plan.buckets import LONGEST
from engine_ext.plan.prompts import Prompts
from engine_ext.simulate.policies import prepare

POLICIES = ("fcfs", "dfs", "batchweave")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with lengths/, text/ and tokenizers/, or work/ of a pack")
    parser.add_argument("--gpu", choices=sorted(PRESETS), default="h100")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each run at the bound (default 40)")
    given = parser.parse_args()
    warm_up.ensure()
    cost = CostModel(preset("llama-3-8b"), Machine(hardware(given.gpu)))
    print("| workload | steps | fcfs s | dfs s | batchweave s | over fcfs | over the better one |")
    print("|---|---|---|---|---|---|---|")
    for mix, _ in ROWS:
        workload = workloads.read(given.data, mix, cost, given.seconds)
        told, caps = workload.work, np.full(len(workload.prompts), LONGEST)
        untold = prepare(Prompts.of(workload.prompts), told.output, cost, caps, foretold=False)
        for clock in Clock:
            model = EngineModel.of(cost, clock)
            fcfs, dfs, ours = (predicted(policy, model, told, untold).seconds for policy in POLICIES)
            gains = f"{fcfs / ours:.2f} | {min(fcfs, dfs) / ours:.2f}"
            print(f"| {mix} | {clock.name.lower()} | {fcfs:.0f} | {dfs:.0f} | {ours:.0f} | {gains} |", flush=True)


if __name__ == "__main__":
    main()
