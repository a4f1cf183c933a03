"""Measure what batchweave's plugin costs an engine that it does not schedule: SGLang with it and without it.

python -m benchmarks.tax [--rounds 8] [--requests 300]

Both engines run real SGLang with the demo's model on this machine at the same time, and take turns: the same requests
go to one and then to the other, and which one is first alternates. One engine has the plugin, with
BATCHWEAVE_SCHEDULING's `sglang`; the other has only what SGLang needs to run on a CPU. Prints the ratio of each round
and their median.
"""

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from engine_ext.costs.cost import CostModel
from engine_ext.costs.hardware import Machine, hardware
from engine_ext.costs.model_shape import preset
from service.demo.model import ensure_demo_model
from service.demo.prompts import corpus


def start(model: str, with_plugin: bool) -> Any:
    """Start one engine; it passes its options to its scheduler through the environment."""
    from sglang.srt.entrypoints.engine import Engine

    from engine_ext.plugin.options import VARIABLE, Options, Scheduling
    from engine_ext.plugin.worker.host import CPU_DEFAULTS

    os.environ.pop(VARIABLE, None)
    if with_plugin:
        Options(CostModel(preset("llama-3-8b"), Machine(hardware("h200"))), Scheduling.SGLANG).hand_over()
    arguments = {
        **CPU_DEFAULTS,
        "model_path": model,
        "log_level": "error",
        "random_seed": 0,
        "disable_radix_cache": False,
    }
    return Engine(**arguments, skip_server_warmup=True)


async def run(engine: Any, prompts: list[list[int]], outputs: list[int]) -> float:
    started = time.perf_counter()
    await asyncio.gather(
        *(
            engine.async_generate(
                input_ids=prompt, sampling_params={"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0}
            )
            for prompt, tokens in zip(prompts, outputs, strict=True)
        )
    )
    return time.perf_counter() - started


async def compare(engines: list[Any], rounds: int, requests: int) -> list[float]:
    for engine in engines:
        engine.tokenizer_manager.auto_create_handle_loop()
    generator, ratios = np.random.default_rng(0), list[float]()
    for number in range(rounds + 1):
        prompts = [generator.integers(10, 900, size).tolist() for size in generator.integers(64, 256, requests)]
        outputs = generator.integers(8, 48, requests).tolist()
        seconds = [0.0, 0.0]
        for which in (0, 1) if number % 2 else (1, 0):
            seconds[which] = await run(engines[which], prompts, outputs)
        if number == 0:
            continue  # the first round compiles and loads
        ratios.append(seconds[1] / seconds[0])
        print(
            f"round {number}: without {seconds[0]:.2f} s, with {seconds[1]:.2f} s, ratio {ratios[-1]:.3f}", flush=True
        )
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--requests", type=int, default=300)
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        model = str(ensure_demo_model(Path(folder) / "model", corpus()))
        engines = [start(model, with_plugin) for with_plugin in (False, True)]
        ratios = asyncio.get_event_loop().run_until_complete(compare(engines, given.rounds, given.requests))
        print(f"with the plugin a round takes {median(ratios):.3f} times as long (median of {len(ratios)})")
        for engine in engines:
            engine.shutdown()


if __name__ == "__main__":
    main()
