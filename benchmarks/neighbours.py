"""Measures how long one project waits for a short answer while another one's long prompts are computed.

    python -m benchmarks.neighbours [--smollm]

The tiny model or the demo's real one on this machine's CPU, through the worker's host. Project A sends one body: eight
different long prompts, one with log probabilities, one with many answers, or a thousand short ones. B asks for 1 or 8
tokens after a word, 2 or 20 times a second, until A has its answers. Prints B's median and worst wait, and how long A
took.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.engine_process import EngineProcess
from service.demo.prompts import corpus
from service.demo.smollm import ensure_smollm
from service.demo.tiny import NAME, ensure_tiny_model
from service.estimates.model_costs import planning_costs


class Case(NamedTuple):
    """What A sends: prompts of so many tokens, with log probabilities of each token, or with several answers.

    B asks for `asked` tokens every `every_s` seconds.
    """

    asked: int = 1
    every_s: float = 0.5
    prompts: int = 1
    tokens: int = 7900
    logprobs: int = 0
    n: int = 1


CASES = (
    Case(prompts=8),
    Case(every_s=0.05, prompts=8),
    Case(asked=8, prompts=8),
    Case(logprobs=20),
    Case(logprobs=85),
    Case(tokens=4000, n=128),
)
REAL = (  # it computes 250 tokens a second
    Case(tokens=4000, n=128),
    Case(tokens=4000),
    Case(tokens=1000, logprobs=20),
    Case(tokens=20, n=64),
    Case(prompts=1000, tokens=1),
)
ANSWER = 32  # tokens of each of several answers


def _make_host(model: str) -> Any:
    from engine_ext.plugin.options import Options
    from engine_ext.plugin.worker.host import EngineHost

    return EngineHost(model, NAME, {}, Options(planning_costs(model, "h200", 1)))


async def _start(host: Any) -> None:
    await host.start()


async def _case(host: Any, number: int, case: Case) -> tuple[list[float], float]:
    async def ask(name: str) -> float:
        began = time.monotonic()
        body = {"model": NAME, "messages": [{"role": "user", "content": "hi"}], "max_tokens": case.asked}
        answer = await host.serve("/v1/chat/completions", {**body, "ignore_eos": True}, name, project="b")
        assert answer.status_code == 200, answer.body
        return time.monotonic() - began

    await ask(f"chatcmpl-warm-{number}")
    prompts = [[10 + number * 8 + each] * case.tokens for each in range(case.prompts)]
    body: dict[str, Any] = {"model": NAME, "prompt": prompts, "max_tokens": 1}
    body |= {"echo": True, "logprobs": case.logprobs} if case.logprobs else {}
    body |= {"n": case.n, "max_tokens": ANSWER, "ignore_eos": True} if case.n > 1 else {}
    began = time.monotonic()
    theirs = asyncio.create_task(host.serve("/v1/completions", body, f"cmpl-{number}", project="a"))
    asked: list[asyncio.Task[float]] = []
    while not theirs.done():
        asked.append(asyncio.create_task(ask(f"chatcmpl-{number}-{len(asked)}")))
        await asyncio.sleep(case.every_s)
    took = time.monotonic() - began
    answer = await theirs
    assert answer.status_code == 200, answer.body
    return list(await asyncio.gather(*asked)), took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smollm", action="store_true", help="the demo's real model")
    is_real = parser.parse_args().smollm
    with tempfile.TemporaryDirectory(prefix="batchweave-neighbours-") as folder:
        path = Path(folder) / "model"
        model = ensure_smollm(path) if is_real else ensure_tiny_model(path, corpus())
        with EngineProcess(partial(_make_host, str(model)), Path(folder) / "engine.log") as engine:
            engine.do(_start)
            for number, case in enumerate(REAL if is_real else CASES):
                waits, took = engine.do(_case, number, case)
                waited = f"median {statistics.median(waits):.2f} s, worst {max(waits):.2f} s of {len(waits)}"
                print(f"{case}: B waits {waited}; A took {took:.1f} s", flush=True)


if __name__ == "__main__":
    main()
