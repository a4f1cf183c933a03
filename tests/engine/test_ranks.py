"""Two tensor-parallel ranks on the CPU, each a process of its own with a scheduler and a scan."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine_process import EngineProcess
from engine_ext.plugin.worker.host import EngineHost
from service.demo.prompts import COMPLETIONS
from service.demo.tiny import NAME
from tests.engine.conftest import running_engine

CORES = "|".join(str(sorted(os.sched_getaffinity(0))[rank % len(os.sched_getaffinity(0))]) for rank in range(2))
ENVIRONMENT = {"SGLANG_CPU_OMP_THREADS_BIND": CORES}
PREFIXES, QUESTIONS = 6, 10
STEPS = int(os.environ.get("RANK_STEPS", "1"))  # that two ranks take beside online requests, at least
# Its costs are those of `running_engine`: ranks that plan with different ones decide differently.
FOLLOWER = """
import json, sys
from engine_ext.plugin.options import Options
from engine_ext.plugin.worker.host import EngineHost
from service.estimates.model_costs import planning_costs
model, name, arguments = json.loads(sys.argv[1])
arguments["enable_deterministic_inference"] = True
EngineHost(model, name, arguments, Options(planning_costs(model, "h200", 1)))  # returns when the first rank ends
"""


@contextmanager
def follower(model: Path, arguments: dict[str, Any], log: Path) -> Generator[None, None, None]:
    given = json.dumps([str(model), NAME, arguments | {"node_rank": 1}])
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", FOLLOWER, given], stdout=file, stderr=file, env=os.environ | ENVIRONMENT
        )
    try:
        yield
        process.wait(120)
    finally:
        process.kill()


@pytest.fixture(scope="module")
def ranks(demo: Path, log: Path) -> Generator[EngineProcess[Any], None, None]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        meeting = f"127.0.0.1:{free.getsockname()[1]}"
    arguments = {"tp_size": 2, "nnodes": 2, "dist_init_addr": meeting, "max_total_tokens": 6000}
    with (
        follower(demo, arguments, log.with_name("follower.log")),
        running_engine(demo, arguments | {"node_rank": 0}, log, ENVIRONMENT) as engine,
    ):
        yield engine


@pytest.mark.slow
def test_two_ranks_decide_the_same_while_requests_come_and_go(ranks: EngineProcess[Any]) -> None:
    """The scan learns lengths, holds what shares a prefix, retracts and plans again; a divergence would end both."""

    async def ask(host: Any, number: int, is_planned: asyncio.Event) -> tuple[int, dict[str, Any]]:
        prefix, question = number % PREFIXES, number // PREFIXES
        if question > 0:  # comes after the first plan, which may take long the first time: so another one is made
            await is_planned.wait()
            await asyncio.sleep(question / 10)
        body = {
            "model": NAME,
            "prompt": " ".join(f"part{prefix} {k}" for k in range(100)) + f" question {question}",
            "max_tokens": 5 + number * 7 % 60,
            "ignore_eos": number % 3 == 0,
        }
        answer = await host.run(COMPLETIONS, body, f"ranks-{number:03}", f"kind {number % 2}")
        return answer.status_code, json.loads(answer.body)

    async def until_planned(host: Any, is_planned: asyncio.Event) -> None:
        while (await host.scheduler_states())[0]["plans"] < 1:
            await asyncio.sleep(0.05)
        is_planned.set()

    async def run(host: Any) -> list[tuple[int, dict[str, Any]]]:
        is_planned = asyncio.Event()
        asked = [ask(host, number, is_planned) for number in range(PREFIXES * QUESTIONS)]
        return (await asyncio.gather(asyncio.gather(*asked), until_planned(host, is_planned)))[0]

    found = ranks.do(run)

    assert [status for status, _ in found] == [200] * (PREFIXES * QUESTIONS)
    [state] = ranks.do(EngineHost.scheduler_states)
    assert state["admitted"] >= PREFIXES * QUESTIONS
    assert state["plans"] > 1
    cached = sum((body["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0) for _, body in found)
    assert cached > 0.5 * sum(body["usage"]["prompt_tokens"] for _, body in found)


@pytest.mark.slow
def test_two_ranks_decide_the_same_beside_online_requests(ranks: EngineProcess[Any]) -> None:
    """A step's limit depends on the time until deadlines: ranks with clocks of their own would differ, and hang.

    `RANK_STEPS=10000 pytest -n 0 --timeout 3600 tests/engine/test_ranks.py` goes on for as many steps.
    """

    async def batch(host: Any, number: int) -> int:
        prompt = " ".join(f"word{number} {k}" for k in range(60 if number % 3 else 300))
        body = {"model": NAME, "prompt": prompt, "max_tokens": 60 + number % 40, "ignore_eos": True}
        return (await host.run(COMPLETIONS, body, f"beside-{number:03}", "beside")).status_code

    async def online(host: Any, number: int) -> int:
        await asyncio.sleep(number % 20 / 5)
        sampling = {"max_new_tokens": 20, "ignore_eos": True, "temperature": 0}
        ids = [10 + (number * 31 + k) % 900 for k in range(50 if number % 4 else 700)]
        engine: Any = host._engine
        found = await engine.async_generate(input_ids=ids, sampling_params=sampling)
        return len(found["output_ids"])

    async def run(host: Any, turn: int) -> tuple[list[int], list[int]]:
        batches = asyncio.gather(*(batch(host, 40 * turn + number) for number in range(40)))
        answers = await asyncio.gather(*(online(host, 20 * turn + number) for number in range(20)))
        return await batches, list(answers)

    [before] = ranks.do(EngineHost.scheduler_states)
    turns = steps = 0
    state = before
    while steps < STEPS:
        assert ranks.do(run, turns) == ([200] * 40, [20] * 20)
        [state] = ranks.do(EngineHost.scheduler_states)
        turns, steps = turns + 1, state["decisions"] - before["decisions"]
    print(f"{steps} steps, {turns} times 40 requests of a batch and 20 online ones")
    assert state["online_ended"] - before["online_ended"] == 20 * turns
    assert state["limited_steps"] > before["limited_steps"]
