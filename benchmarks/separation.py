"""What it costs that projects share no KV cache, simulated: `python -m benchmarks.separation`.

Each request has a system prompt that all projects share, 300 tokens of its own and an answer of 150 tokens in the
mean. Batchweave's scheduling on Llama-3-8B and one H200, mixed chunks, without online requests; lengths are known.
"""

import numpy as np

from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import Clock, EngineModel
from engine_ext.costs.hardware import Machine, hardware
from engine_ext.costs.model_shape import preset
from engine_ext.plan.prompts import Prompts
from engine_ext.simulate.policies import prepare, simulate

CASES = ((10, 1000, 8000), (100, 1000, 8000), (1000, 1000, 8000), (100, 8000, 4000))  # projects, prompt, requests
OWN, ANSWER, CAP = 300, 150.0, 4096  # tokens


def seconds(prompts: Prompts, answers: np.ndarray, cost: CostModel, model: EngineModel) -> float:
    caps = np.full(len(prompts), CAP, dtype=np.int64)
    return simulate(prepare(prompts, answers, cost, caps, sample=1.0), model, "batchweave").seconds


def main() -> None:
    cost = CostModel(preset("llama-3-8b"), Machine(hardware("h200")))
    model, rng = EngineModel.of(cost, Clock.MIXED), np.random.default_rng(0)
    print("| projects | shared prompt | requests | one cache | a cache each | more |\n|---|---|---|---|---|---|")
    for projects, shared, requests in CASES:
        prompts = Prompts.of_segments([[("system", shared), (k, OWN)] for k in range(requests)])
        answers = np.maximum(1, rng.exponential(ANSWER, requests)).astype(np.int64)
        owners, names = rng.integers(0, projects, requests), [f"proj_{k}" for k in range(projects)]
        one, each = (seconds(found, answers, cost, model) for found in (prompts, prompts.kept_apart(names, owners)))
        print(f"| {projects} | {shared} | {requests} | {one:.1f} s | {each:.1f} s | {each / one - 1:.1%} |", flush=True)


if __name__ == "__main__":
    main()
