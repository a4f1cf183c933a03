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

from service.demo.model import NAME, ensure_demo_model
from service.demo.prompts import COMPLETIONS, corpus
from tests.engine.conftest import RealEngine, running_engine

CORES = "|".join(str(sorted(os.sched_getaffinity(0))[rank % len(os.sched_getaffinity(0))]) for rank in range(2))
PREFIXES, QUESTIONS = 6, 10
STEPS = int(os.environ.get("RANK_STEPS", "1"))  # that two ranks take beside online requests, at least
# Its costs are those of `running_engine`: ranks that plan with different ones decide differently.
FOLLOWER = """
import json, sys
from engine_ext.plugin.options import Options
from engine_ext.plugin.worker.host import EngineHost
from service.estimates.model_costs import planning_costs
model, name, arguments = json.loads(sys.argv[1])
EngineHost(model, name, arguments, Options(planning_costs(model, "h200", 1)))  # returns when the first rank ends
"""


@contextmanager
def follower(model: Path, arguments: dict[str, Any], log: Path) -> Generator[None, None, None]:
    given = json.dumps([str(model), NAME, arguments | {"node_rank": 1}])
    with log.open("w") as file:
        process = subprocess.Popen([sys.executable, "-c", FOLLOWER, given], stdout=file, stderr=file)
    try:
        yield
        process.wait(120)
    finally:
        process.kill()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Generator[RealEngine, None, None]:
    folder = tmp_path_factory.mktemp("ranks")
    model = ensure_demo_model(folder / "demo", corpus())
    with socket.create_server(("127.0.0.1", 0)) as free:
        meeting = f"127.0.0.1:{free.getsockname()[1]}"
    arguments = {"tp_size": 2, "nnodes": 2, "dist_init_addr": meeting, "max_total_tokens": 6000}
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SGLANG_CPU_OMP_THREADS_BIND", CORES)
        with (
            follower(model, arguments, folder / "follower.log"),
            running_engine(model, NAME, arguments | {"node_rank": 0}) as engine,
        ):
            yield engine


def test_two_ranks_decide_the_same_while_requests_come_and_go(ranks: RealEngine) -> None:
    """The scan learns lengths, holds what shares a prefix, retracts and plans again; a divergence would end both."""
    is_planned = asyncio.Event()

    async def ask(number: int) -> tuple[int, dict[str, Any]]:
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
        answer = await ranks.host.run(COMPLETIONS, body, f"ranks-{number:03}", f"kind {number % 2}")
        return answer.status_code, json.loads(answer.body)

    async def until_planned() -> None:
        while (await ranks.host.scheduler_states())[0]["plans"] < 1:
            await asyncio.sleep(0.05)
        is_planned.set()

    async def run() -> list[tuple[int, dict[str, Any]]]:
        asked = [ask(number) for number in range(PREFIXES * QUESTIONS)]
        return (await asyncio.gather(asyncio.gather(*asked), until_planned()))[0]

    found = ranks.do(run())

    assert [status for status, _ in found] == [200] * (PREFIXES * QUESTIONS)
    [state] = ranks.do(ranks.host.scheduler_states())
    assert state["admitted"] >= PREFIXES * QUESTIONS
    assert state["plans"] > 1
    cached = sum((body["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0) for _, body in found)
    assert cached > 0.5 * sum(body["usage"]["prompt_tokens"] for _, body in found)


def test_two_ranks_decide_the_same_beside_online_requests(ranks: RealEngine) -> None:
    """A step's limit depends on the time until deadlines: ranks with clocks of their own would differ, and hang.

    `RANK_STEPS=10000 pytest -n 0 --timeout 3600 tests/engine/test_ranks.py` goes on for as many steps.
    """
    engine: Any = ranks.host._engine

    async def batch(number: int) -> int:
        prompt = " ".join(f"word{number} {k}" for k in range(60 if number % 3 else 300))
        body = {"model": NAME, "prompt": prompt, "max_tokens": 60 + number % 40, "ignore_eos": True}
        return (await ranks.host.run(COMPLETIONS, body, f"beside-{number:03}", "beside")).status_code

    async def online(number: int) -> int:
        await asyncio.sleep(number % 20 / 5)
        sampling = {"max_new_tokens": 20, "ignore_eos": True, "temperature": 0}
        ids = [10 + (number * 31 + k) % 900 for k in range(50 if number % 4 else 700)]
        found = await engine.async_generate(input_ids=ids, sampling_params=sampling)
        return len(found["output_ids"])

    async def run(turn: int) -> tuple[list[int], list[int]]:
        batches = asyncio.gather(*(batch(40 * turn + number) for number in range(40)))
        answers = await asyncio.gather(*(online(20 * turn + number) for number in range(20)))
        return await batches, list(answers)

    [before] = ranks.do(ranks.host.scheduler_states())
    turns = steps = 0
    state = before
    while steps < STEPS:
        assert ranks.do(run(turns)) == ([200] * 40, [20] * 20)
        [state] = ranks.do(ranks.host.scheduler_states())
        turns, steps = turns + 1, state["decisions"] - before["decisions"]
    print(f"{steps} steps, {turns} times 40 requests of a batch and 20 online ones")
    assert state["online_ended"] - before["online_ended"] == 20 * turns
    assert state["limited_steps"] > before["limited_steps"]
