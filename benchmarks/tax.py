"""Measure what batchweave's plugin costs requests that are not its own: SGLang with it and without it.

python -m benchmarks.tax [--rounds 8] [--requests 300]            # an engine that the plugin does not schedule
python -m benchmarks.tax --scheduling dual-scan --clients 4       # online requests alone, on an engine with the scan

Both engines run real SGLang with the demo's model on this machine at the same time, and take turns: the same requests
go to one and then to the other, and which one is first alternates. One engine has the plugin, with
BATCHWEAVE_SCHEDULING's `sglang` or `dual-scan`; the other has only what SGLang needs to run on a CPU. Each client sends
its next request when its last one has been answered. Prints the ratios of each round, and their medians: of a round's
seconds, of the mean time to the first token, and of the mean time between tokens.
"""

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np

from engine_ext.costs.cost import CostModel
from engine_ext.costs.hardware import Machine, hardware
from engine_ext.costs.model_shape import preset
from service.demo.prompts import corpus
from service.demo.tiny import ensure_tiny_model


class Figures(NamedTuple):
    """Holds a round's length and its requests' mean TTFT and TBT: in seconds, or over those of the other engine."""

    round: float
    ttft: float
    tbt: float


def start(model: str, scheduling: str | None) -> Any:
    """Start one engine, with the plugin if `scheduling` is given, which reads its options from the environment."""
    from sglang.srt.entrypoints.engine import Engine

    from engine_ext.plugin.options import VARIABLE, Options, Scheduling
    from engine_ext.plugin.worker.cpu_defaults import CPU_DEFAULTS

    os.environ.pop(VARIABLE, None)
    if scheduling is not None:
        cost = CostModel(preset("llama-3-8b"), Machine(hardware("h200")))
        # A number of threads, or the plugin computes attention on a CPU in float64.
        Options(cost, Scheduling(scheduling), cpu_threads=1).hand_over()
    arguments = {
        **CPU_DEFAULTS,
        "model_path": model,
        "log_level": "error",
        "random_seed": 0,
        "disable_radix_cache": False,
    }
    return Engine(**arguments, skip_server_warmup=True)


async def run(engine: Any, prompts: list[list[int]], outputs: list[int], clients: int) -> Figures:
    started, turns = time.perf_counter(), iter(zip(prompts, outputs, strict=True))
    ttft, tbt = list[float](), list[float]()

    async def client() -> None:
        for prompt, tokens in turns:
            sent, last, tokens_so_far = time.perf_counter(), 0.0, 0
            sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0}
            stream = await engine.async_generate(input_ids=prompt, sampling_params=sampling, stream=True)
            async for chunk in stream:
                now, got = time.perf_counter(), chunk["meta_info"]["completion_tokens"]
                if tokens_so_far == 0:
                    ttft.append(now - sent)
                elif got > tokens_so_far:
                    tbt.extend([(now - last) / (got - tokens_so_far)] * (got - tokens_so_far))
                last, tokens_so_far = now, got

    await asyncio.gather(*(client() for _ in range(clients)))
    return Figures(time.perf_counter() - started, mean(ttft), mean(tbt))


async def compare(engines: list[Any], rounds: int, requests: int, clients: int) -> list[Figures]:
    """Return the ratios of each round: what it took with the plugin, over what it took without."""
    for engine in engines:
        engine.tokenizer_manager.auto_create_handle_loop()
    generator, ratios = np.random.default_rng(0), list[Figures]()
    for number in range(rounds + 1):
        prompts = [generator.integers(10, 900, size).tolist() for size in generator.integers(64, 256, requests)]
        outputs = generator.integers(8, 48, requests).tolist()
        took: dict[int, Figures] = {}
        for which in (0, 1) if number % 2 else (1, 0):
            took[which] = await run(engines[which], prompts, outputs, clients)
        if number == 0:
            continue  # the first round compiles and loads
        ratios.append(Figures(*(found / plain for found, plain in zip(took[1], took[0], strict=True))))
        print(
            f"round {number}: {took[0].round:.2f} s without, {took[1].round:.2f} s with; ratios: round "
            f"{ratios[-1].round:.3f}, TTFT {ratios[-1].ttft:.3f}, TBT {ratios[-1].tbt:.3f}",
            flush=True,
        )
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--clients", type=int, default=300, help="requests in flight")
    parser.add_argument("--scheduling", choices=("sglang", "dual-scan"), default="sglang")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        model = str(ensure_tiny_model(Path(folder) / "model", corpus()))
        engines = [start(model, scheduling) for scheduling in (None, given.scheduling)]
        ratios = asyncio.get_event_loop().run_until_complete(
            compare(engines, given.rounds, given.requests, given.clients)
        )
        print(f"medians of {len(ratios)} rounds, with the plugin over without:")
        for name, values in zip(("round", "TTFT", "TBT"), zip(*ratios, strict=True), strict=True):
            print(f"  {name} {median(values):.3f}")
        for engine in engines:
            engine.shutdown()


if __name__ == "__main__":
    main()
