"""Measures how long one project waits for a short answer beside another one's long lists of prompts, and their end.

    python -m benchmarks.long_lists

The tiny model on this machine's CPU, through the worker's host. Project A sends several requests at once, each a list
of prompts, texts to embed, or items to score beside a long query, and hangs up after some seconds. In one case all its
prompts are a chain, each the beginning of the next one. B asks for one short
answer twice a second until five seconds later. Prints B's worst wait before and after the end, and how many of A's
requests were answered.
"""

import asyncio
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.engine_process import EngineProcess
from service.demo.prompts import corpus
from service.demo.tiny import NAME, ensure_tiny_model
from service.estimates.model_costs import planning_costs

COMPLETIONS, EMBEDDINGS, SCORE = "/v1/completions", "/v1/embeddings", "/v1/score"
SHORT = {COMPLETIONS: {"prompt": "hi", "max_tokens": 1}, EMBEDDINGS: {"input": "hi"}}  # what B asks for
EVERY_S, AFTER_S = 0.5, 5.0
CHAIN = [100 + number * number % 1500 for number in range(4000)]


class Case(NamedTuple):
    """How many requests A sends to an endpoint, how many prompts each has, and when A hangs up."""

    endpoint: str
    requests: int
    prompts: int
    leaves_s: float
    is_online: bool = False
    is_chain: bool = False

    def body(self, number: int) -> dict[str, Any]:
        lists = [[100 + (number * 7 + each) % 1500] * 3 for each in range(self.prompts)]
        if self.endpoint == SCORE:
            return {"query": "the sea is blue and " * 400, "items": ["a"] * self.prompts, "label_token_ids": [5]}
        if self.is_chain:
            lists = [CHAIN[: number * self.prompts + each + 1] for each in range(self.prompts)]
        return {"input": lists} if self.endpoint == EMBEDDINGS else {"prompt": lists, "max_tokens": 1}


CASES = {
    COMPLETIONS: (
        Case(COMPLETIONS, 40, 1000, 10.0),
        Case(COMPLETIONS, 16, 1000, 3.0, is_online=True),
        Case(COMPLETIONS, 50, 50, 20.0, is_chain=True),
        Case(SCORE, 6, 1000, 10.0),
    ),
    EMBEDDINGS: (Case(EMBEDDINGS, 12, 2048, 10.0), Case(EMBEDDINGS, 16, 2048, 3.0, is_online=True)),
}


def _make_host(model: str, embeds: bool) -> Any:
    from engine_ext.plugin.options import Options
    from engine_ext.plugin.worker.host import EngineHost

    return EngineHost(model, NAME, {"is_embedding": embeds}, Options(planning_costs(model, "h200", 1)))


async def _start(host: Any) -> None:
    await host.start()


async def _case(host: Any, case: Case, short: str) -> str:
    from engine_ext.plugin.marks import Terms

    async def ask() -> float:
        began = time.monotonic()
        answer = await host.serve(short, {"model": NAME, **SHORT[short]}, f"b-{time.monotonic_ns()}", project="b")
        assert answer.status_code == 200, answer.body
        return time.monotonic() - began

    def send(number: int) -> asyncio.Task[Any]:
        body, rid = {"model": NAME, **case.body(number)}, f"a-{time.monotonic_ns()}-{number}"
        if case.is_online:
            return asyncio.create_task(host.serve(case.endpoint, body, rid, project="a"))
        return asyncio.create_task(host.run(case.endpoint, body, rid, "batch", Terms(project="a")))

    async def asked(seconds: float) -> list[asyncio.Task[float]]:
        found, until = list[asyncio.Task[float]](), time.monotonic() + seconds
        while time.monotonic() < until:
            found.append(asyncio.create_task(ask()))
            await asyncio.sleep(EVERY_S)
        return found

    await ask()
    theirs = [send(number) for number in range(case.requests)]
    before = await asked(case.leaves_s)
    answered = sum(each.done() and each.result().status_code == 200 for each in theirs)
    for each in theirs:
        each.cancel()
    await asyncio.gather(*theirs, return_exceptions=True)
    after = await asked(AFTER_S)
    worst = [max(await asyncio.gather(*each)) for each in (before, after)]
    return f"B waits {worst[0]:.2f} s at worst, {worst[1]:.2f} s after the end; {answered} of A's were answered"


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="batchweave-lists-") as folder:
        model = ensure_tiny_model(Path(folder) / "model", corpus())
        for short, cases in CASES.items():
            host = partial(_make_host, str(model), short == EMBEDDINGS)
            with EngineProcess(host, Path(folder) / "engine.log") as engine:
                engine.do(_start)
                for case in cases:
                    print(f"{case}: {engine.do(_case, case, short)}", flush=True)


if __name__ == "__main__":
    main()
