"""Requests that have not begun come back from SGLang for another worker; the others go on."""

import asyncio
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from benchmarks.engine_process import EngineProcess
from engine_ext.plugin.scheduler import withdrawals
from engine_ext.plugin.withdrawal import withdrawal_of
from engine_ext.plugin.worker.host import EngineHost
from service.demo.tiny import NAME
from tests.engine.conftest import running_engine

AT_ONCE = 4
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def narrow(demo: Path, log: Path) -> Generator[EngineProcess[Any], None, None]:
    with running_engine(demo, {"max_running_requests": AT_ONCE}, log) as running:
        yield running


async def run_and_withdraw(host: Any, most: int, **more: Any) -> tuple[list[bool], list[Any]]:
    """Which of 24 requests had come back when the withdrawal ended, and the answers of all, in their order."""
    rids = [f"chatcmpl-{number:04}-{more.get('n', 1)}-{most}" for number in range(24)]
    tasks: list[asyncio.Task[Any]] = []
    for number, rid in enumerate(rids):
        messages = [{"role": "user", "content": f"Tell me of the number {number}."}]
        body = {"model": NAME, "messages": messages, "max_tokens": 48, "temperature": 0, "ignore_eos": True, **more}
        tasks.append(asyncio.create_task(host.run(CHAT, body, rid, "batch")))
    async with asyncio.timeout(120):
        while sum(state.get("running", 0) for state in await host.scheduler_states()) < AT_ONCE:
            await asyncio.sleep(0.02)
        asked = rids[::-1]
        await host.withdraw(asked, most)
        done = [task.done() and task.result().aborted for task in tasks]
        answers = await asyncio.gather(*tasks)
    return done, answers


def test_what_waits_comes_back_and_what_runs_goes_on(narrow: EngineProcess[Any]) -> None:
    back, answers = narrow.do(run_and_withdraw, 8)
    assert sum(back) == 8
    assert back == [answer.aborted for answer in answers]
    assert {answer.status_code for answer in answers if not answer.aborted} == {200}
    back, answers = narrow.do(run_and_withdraw, 1000)
    assert back == [answer.aborted for answer in answers]
    assert 24 - 3 * AT_ONCE <= sum(back) <= 24 - AT_ONCE, "all but those that run, and as many that ended meanwhile"
    [state] = narrow.do(EngineHost.scheduler_states)
    assert (state["waiting"], state["running"], state["queued"]) == (0, 0, 0)


def test_requests_for_several_answers_stay(narrow: EngineProcess[Any]) -> None:
    back, answers = narrow.do(run_and_withdraw, 1000, n=2)
    assert not any(back)
    assert {answer.status_code for answer in answers} == {200}


def test_only_what_has_no_output_is_given_back() -> None:
    """Where SGLang's own policy schedules, a request that it retracted waits among those that never began."""
    queue = [SimpleNamespace(rid=rid, output_ids=[7] if rid == "b" else []) for rid in "abc"]
    aborted: list[Any] = []
    scheduler = SimpleNamespace(waiting_queue=queue)
    withdrawals.abort(lambda _, each: aborted.append(each.rid), scheduler, withdrawal_of(["d", "c", "b", "a"], 2))
    assert aborted == ["c", "a"]
    ordinary = SimpleNamespace(rid="b", abort_message=None)
    withdrawals.abort(lambda _, each: aborted.append(each.rid), scheduler, ordinary)
    assert aborted == ["c", "a", "b"]


async def leave_a_list(host: Any) -> Any:
    """Ask for many long answers in one request, and hang up once some are computed; what another then waits for."""
    prompts = [[10 + number] * 4 for number in range(300)]
    body = {"model": NAME, "prompt": prompts, "max_tokens": 5000, "ignore_eos": True}
    task = asyncio.create_task(host.run("/v1/completions", body, "cmpl-left", "batch"))
    async with asyncio.timeout(120):
        while not (await host.scheduler_states())[0]["running"]:
            await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        while (await host.scheduler_states())[0]["running"]:
            await asyncio.sleep(0.02)
    return len(host._manager.rid_to_state)


def test_a_list_that_nobody_waits_for_ends_as_a_whole(narrow: EngineProcess[Any]) -> None:
    assert narrow.do(leave_a_list) == 0
