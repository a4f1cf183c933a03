"""Run policies in real SGLang on an emulated machine, and compare each with the simulator's prediction.

python -m benchmarks.emulated DATA [--scale 0.05] [--mixes h200-1,documents] [--clocks overlapped] [--policies …]

SGLang's scheduler, radix cache, KV accounting and retraction are real. The cost model of an H200 with Llama-3-8B
replaces the forward pass, on its own clock (plugin/scheduler/emulated.py). SGLang's policies get the chunk size and the
new token ratio that the simulator finds best for them, and the true output lengths as max_tokens, by which SGLang
reserves memory. Ours does not know the lengths, neither here nor in the simulator, because an engine knows a length
only when its answer has ended. Nothing here was measured on a GPU.
"""

import argparse
import asyncio
import json
import multiprocessing
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from queue import Empty
from typing import Any

import numpy as np

from benchmarks import mixes
from benchmarks.simulate.batches import simulate
from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import Clock, EngineModel
from engine_ext.costs.hardware import Machine, hardware
from engine_ext.costs.model_shape import preset
from engine_ext.plan.buckets import LONGEST
from engine_ext.plan.prompts import Prompts, Segment
from engine_ext.simulate.policies import Outcome, Work, prepare
from service.demo.prompts import corpus
from service.demo.tiny import ensure_tiny_model

MIXES = ("h200-1", "h200-2", "h200-3", "h200-4", "documents")
SGLANG = {"fcfs": "fcfs", "lpm": "lpm", "dfs-weight": "dfs-weight", "dfs": "fcfs"}
POLICIES = (*SGLANG, "batchweave")
VOCABULARY = (10, 900)  # token ids of the small model, which never runs
SCALE = 0.05
TIMES = {"documents": 6.0}  # so that prefixes do not fit into the KV cache at the same scale


def deciding(state: dict[str, Any]) -> dict[str, float]:
    """Return how long the plugin's hooks took for each decision, and the P99 of recent steps, in milliseconds.

    It is real time on this machine, whatever clock the engine has; 0 where SGLang decided alone.
    """
    mean_s = state.get("deciding_s", 0.0) / max(1, state.get("decisions", 0))
    return {"deciding_ms": 1e3 * mean_s, "deciding_p99_ms": 1e3 * state.get("deciding_p99_s", 0.0)}


def tokens_of(segments: Iterable[Sequence[Segment]]) -> list[list[int]]:
    """Return token ids of prompts: equal segments get equal ids, different segments get different ids."""
    generator, known = np.random.default_rng(0), dict[Any, list[int]]()
    prompts: list[list[int]] = []
    for each in segments:
        prompt: list[int] = []
        for name, size in each:
            if name not in known:
                known[name] = generator.integers(*VOCABULARY, size).tolist()
            prompt += known[name]
        prompts.append(prompt)
    return prompts


def predicted(policy: str, model: EngineModel, told: Work, untold: Work) -> Outcome:
    """Simulate a policy.

    SGLang's own policies compute a shared prefix for each request of a prefill batch, and know max_tokens.
    """
    if policy == "batchweave":
        return simulate(untold, model, policy)
    return simulate(told, replace(model, computes_twice=True), policy)


def measure(given: argparse.Namespace, names: list[str], rows: "multiprocessing.Queue[dict[str, Any] | None]") -> None:
    """Run all policies and clocks on these mixes, one after the other, on one engine; put each row into `rows`."""
    from benchmarks.engine.bench_engine import BenchEngine
    from benchmarks.engine.tuning import Tuning
    from engine_ext.plugin.options import Emulation

    cost = CostModel(preset("llama-3-8b"), Machine(hardware("h200")))
    with tempfile.TemporaryDirectory() as folder:
        emulation = Emulation.REAL if given.real_time else Emulation.VIRTUAL
        model_path = str(ensure_tiny_model(Path(folder) / "model", corpus()))
        engine = BenchEngine.emulated(model_path, cost, emulation=emulation)
        for name in names:
            mix = mixes.make(given.data, name, given.scale * TIMES.get(name, 1.0), 0)
            ids, outputs = tokens_of(row.segments for row in mix), [row.output_tokens for row in mix]
            prompts, lengths = Prompts.of_segments(row.segments for row in mix), np.array(outputs)
            caps = np.full(len(outputs), LONGEST)
            told = prepare(prompts, lengths, cost, caps, sample=1.0)
            untold = prepare(prompts, lengths, cost, caps, foretold=False)
            order = told.tree.order.tolist()
            for clock in (Clock[each.upper()] for each in given.clocks):
                model = EngineModel.of(cost, clock)
                for policy in given.policies:
                    foreseen = predicted(policy, model, told, untold)
                    tuning = Tuning(SGLANG.get(policy), clock=clock)
                    if foreseen.setting:
                        chunk, ratio = (float(part.split()[1]) for part in foreseen.setting.split(", "))
                        tuning = replace(tuning, chunk=int(chunk), ratio=ratio)
                    sent = order if policy == "dfs" else range(len(ids))
                    found = asyncio.get_event_loop().run_until_complete(
                        engine.run(tuning, [ids[k] for k in sent], [outputs[k] for k in sent])
                    )
                    virtual_s, prompt_tokens = found["virtual_s"], int(told.lengths.sum())
                    rows.put(
                        {
                            "mix": name,
                            "policy": policy,
                            "clock": clock.name.lower(),
                            "device": found["device"],
                            "requests": len(ids),
                            "setting": foreseen.setting,
                            "virtual_s": virtual_s,
                            "predicted_s": foreseen.seconds - foreseen.planner_s,
                            "tokens_per_s": (prompt_tokens + int(lengths.sum())) / virtual_s,
                            "sharing": found["cached_tokens"] / prompt_tokens,
                            "retractions": found["retractions"],
                            "share_of_practical": told.practical_s(model) / virtual_s,
                            "critical_path_s": int(lengths.max()) * max(model.weights_s, model.gemm_s),
                            "steps": found["virtual_steps"],
                            **deciding(found),
                            "plans": found.get("plans"),
                            "wall_s": found["wall_s"],
                        }
                    )
        rows.put(None)
        engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with lengths/, text/ and tokenizers/")
    parser.add_argument("--scale", type=float, default=SCALE, help=f"share of the mixes' requests (default {SCALE})")
    parser.add_argument("--mixes", default=",".join(MIXES))
    parser.add_argument("--clocks", default=",".join(clock.name.lower() for clock in Clock))
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument(
        "--real-time",
        action="store_true",
        help="let each step take its time, as on a GPU: shows what deciding costs while a thread plans",
    )
    parser.add_argument("--output", type=Path, default=Path("results/emulated.json"))
    parser.add_argument("--processes", type=int, default=2, help="engines that run side by side (default 2)")
    given = parser.parse_args()
    for name in ("mixes", "clocks", "policies"):
        setattr(given, name, getattr(given, name).split(","))
    given.output.parent.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    queue: Any = context.Queue()
    parts = [given.mixes[k :: given.processes] for k in range(min(given.processes, len(given.mixes)))]
    workers = [context.Process(target=measure, args=(given, part, queue)) for part in parts]
    for worker in workers:
        worker.start()
    rows: list[dict[str, Any]] = []
    wanted = len(given.mixes) * len(given.clocks) * len(given.policies)
    running = len(workers)
    while running > 0:
        try:
            row = queue.get(timeout=10)
        except Empty:
            failed = [worker.exitcode for worker in workers if worker.exitcode]
            if failed:
                sys.exit(
                    f"a process exited with {failed[0]}, see above; {given.output} has {len(rows)} of {wanted} rows"
                )
            continue
        if row is None:
            running -= 1
            continue
        rows.append(row)
        given.output.write_text(json.dumps(rows, indent=1) + "\n")
        print(
            f"{len(rows)}/{wanted} {row['device']}: {row['mix']} {row['policy']} {row['virtual_s']:.1f} s "
            f"(predicted {row['predicted_s']:.1f}), {row['tokens_per_s']:.0f} tokens/s, sharing {row['sharing']:.3f}, "
            f"retractions {row['retractions']}, {row['share_of_practical']:.3f} of the bound, {row['wall_s']:.0f} s",
            flush=True,
        )
    for worker in workers:
        worker.join()


if __name__ == "__main__":
    main()
