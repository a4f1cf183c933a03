"""Classes of online requests in real SGLang: who goes first, and who is refused before it waits in vain."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

from benchmarks.engine_process import EngineProcess
from engine_ext.coserve.slo import DEFAULT, FLEX, PRIORITY, SloClass
from service.demo.tiny import NAME
from tests.engine.conftest import running_engine

COMPLETIONS = "/v1/completions"
LONG = 2_000  # tokens of a prompt
CHUNK = 256
CLASSES = (SloClass(PRIORITY, ttft_s=60.0), SloClass(DEFAULT, ttft_s=0.001), SloClass(FLEX))


@pytest.fixture(scope="module")
def engine(demo: Path, log: Path) -> Generator[EngineProcess[Any], None, None]:
    args = {"max_running_requests": 32, "chunked_prefill_size": CHUNK}
    with running_engine(demo, args, log, online=CLASSES, sheds=True) as running:
        yield running


async def ask(host: Any, number: int, slo: str) -> float:
    """Return when the first token of a request with a long prompt of its own came."""
    prompt = [10 + (number * 7919 + place * 31) % 200 for place in range(LONG)]
    body = {"model": NAME, "prompt": prompt, "max_tokens": 2, "stream": True, "temperature": 0}
    found = await host.serve(COMPLETIONS, body, f"cmpl-{slo}-{number}", slo)
    at, events = time.monotonic(), [event async for event in found]
    await found.close()
    told = {json.loads(event[6:]).get("service_tier") for event in events[:-1]}
    assert told == {slo}
    return at


def test_stronger_classes_go_first_and_the_weakest_are_refused_first(engine: EngineProcess[Any]) -> None:
    """Each prompt is eight steps, so stronger ones overtake, and no machine keeps the default bound of 1 ms."""

    async def watch(host: Any, refused: Counter[str]) -> None:
        while True:
            for slo in (PRIORITY, DEFAULT, FLEX):
                refused[slo] += host.refusal(slo) is not None
            await asyncio.sleep(0.001)

    async def some_steps(host: Any) -> None:
        steps = await steps_so_far(host)
        while await steps_so_far(host) < steps + 2:
            await asyncio.sleep(0.005)

    async def steps_so_far(host: Any) -> int:
        return (await host.scheduler_states())[0]["engine_steps"]

    async def main(host: Any) -> tuple[Counter[str], dict[str, list[float]]]:
        refused, at = Counter[str](), dict[str, list[float]]()
        assert host.refusal(DEFAULT) is None, "nothing is known before the first step"
        watching = asyncio.create_task(watch(host, refused))
        waiting = {FLEX: [asyncio.create_task(ask(host, k, FLEX)) for k in range(6)]}
        await some_steps(host)
        waiting[DEFAULT] = [asyncio.create_task(ask(host, 10 + k, DEFAULT)) for k in range(6)]
        await some_steps(host)
        waiting[PRIORITY] = [asyncio.create_task(ask(host, 20, PRIORITY))]
        for slo, tasks in waiting.items():
            at[slo] = await asyncio.gather(*tasks)
        watching.cancel()
        async with asyncio.timeout(30):
            while host.refusal(DEFAULT) or host.refusal(FLEX):
                await asyncio.sleep(0.02)
        return refused, at

    refused, at = engine.do(main)
    assert refused[FLEX] > 0
    assert refused[PRIORITY] == 0 < refused[DEFAULT]
    assert at[PRIORITY][0] < sorted(at[DEFAULT])[-2], "it overtook those that came before it"
    assert max(at[DEFAULT]) < max(at[FLEX])


def test_a_whole_answer_says_its_class_too(engine: EngineProcess[Any]) -> None:
    async def main(host: Any) -> Any:
        chat = {"model": NAME, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        response = {"model": NAME, "input": "hi", "max_output_tokens": 2}
        return [
            json.loads((await host.serve(endpoint, body, f"id-{slo}", slo)).body)["service_tier"]
            for endpoint, body in (("/v1/chat/completions", chat), ("/v1/responses", response))
            for slo in (FLEX, PRIORITY)
        ]

    assert engine.do(main) == [FLEX, PRIORITY] * 2
