"""Measures how long one project waits for a short answer while another one's long prompts are computed.

    python -m benchmarks.neighbours

The tiny model on this machine's CPU, through the worker's host. Project A asks for one token after each of eight
different prompts of 8,000 tokens, or for one such prompt with its log probabilities; B asks for 1 or 8 tokens after a
word, 2 or 20 times a second. Prints B's median and worst wait, and how long A took.
"""

import asyncio
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.engine_process import EngineProcess
from service.demo.prompts import corpus
from service.demo.tiny import NAME, ensure_tiny_model
from service.estimates.model_costs import planning_costs

TOKENS = 8000  # of a prompt
# Tokens that B asks for, seconds between two of its requests, A's prompts, and the log probabilities of each token.
CASES = ((1, 0.5, 8, 0), (1, 0.05, 8, 0), (8, 0.5, 8, 0), (1, 0.5, 1, 20), (1, 0.5, 1, 85))


def _make_host(model: str) -> Any:
    from engine_ext.plugin.options import Options
    from engine_ext.plugin.worker.host import EngineHost

    return EngineHost(model, NAME, {}, Options(planning_costs(model, "h200", 1)))


async def _start(host: Any) -> None:
    await host.start()


async def _case(
    host: Any, number: int, tokens: int, every_s: float, count: int, logprobs: int
) -> tuple[list[float], float]:
    async def ask(name: str) -> float:
        began = time.monotonic()
        body = {"model": NAME, "messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens}
        answer = await host.serve("/v1/chat/completions", {**body, "ignore_eos": True}, name, project="b")
        assert answer.status_code == 200, answer.body
        return time.monotonic() - began

    await ask(f"chatcmpl-warm-{number}")
    prompts = [[10 + number * 8 + each] * TOKENS for each in range(count)]
    body: dict[str, Any] = {"model": NAME, "prompt": prompts, "max_tokens": 1}
    body |= {"echo": True, "logprobs": logprobs} if logprobs else {}
    began = time.monotonic()
    theirs = asyncio.create_task(host.serve("/v1/completions", body, f"cmpl-{number}", project="a"))
    asked: list[asyncio.Task[float]] = []
    while not theirs.done():
        asked.append(asyncio.create_task(ask(f"chatcmpl-{number}-{len(asked)}")))
        await asyncio.sleep(every_s)
    took = time.monotonic() - began
    assert (await theirs).status_code == 200
    return list(await asyncio.gather(*asked)), took


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="batchweave-neighbours-") as folder:
        model = ensure_tiny_model(Path(folder) / "model", corpus())
        with EngineProcess(partial(_make_host, str(model)), Path(folder) / "engine.log") as engine:
            engine.do(_start)
            for number, (tokens, every_s, count, logprobs) in enumerate(CASES):
                waits, took = engine.do(_case, number, tokens, every_s, count, logprobs)
                waited = f"median {statistics.median(waits):.2f} s, worst {max(waits):.2f} s of {len(waits)}"
                theirs = f"A sends {count} prompts" + (f" for {logprobs} log probabilities a token" if logprobs else "")
                asked = f"B asks for {tokens} tokens {1 / every_s:.0f} times a second"
                print(f"{theirs}, {asked}: {waited}; A took {took:.1f} s", flush=True)


if __name__ == "__main__":
    main()
