"""A worker stops in time when its machine is about to be taken away."""

import asyncio
import sys
from pathlib import Path

import pytest

from service.errors import StartError
from service.worker import notice


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notice, "ASK_S", 0.02)


async def test_a_worker_stops_once_the_command_says_so(tmp_path: Path) -> None:
    stop = asyncio.Event()
    sign = tmp_path / "notice"
    task = asyncio.create_task(notice.watch(["test", "-e", str(sign)], stop))
    await asyncio.sleep(0.1)
    assert not stop.is_set()
    sign.touch()
    async with asyncio.timeout(30):
        await stop.wait()
        await task


async def test_a_command_that_hangs_or_fails_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notice, "ANSWER_S", 0.05)
    for command in (["sleep", "1000"], ["/nowhere/notice"], [sys.executable, "-c", "raise SystemExit(3)"]):
        stop = asyncio.Event()
        task = asyncio.create_task(notice.watch(command, stop))
        await asyncio.sleep(0.3)
        assert not task.done()
        assert not stop.is_set()
        stop.set()
        async with asyncio.timeout(30):
            await task


@pytest.mark.parametrize("command", [[], ["false"]])
async def test_a_fault_of_the_worker_is_told_as_it_is(command: list[str]) -> None:
    """The command line shows a StartError as one line, and would not know it in a group of exceptions."""

    async def work() -> None:
        async with notice.watched(command, asyncio.Event()):
            await asyncio.sleep(0.05)
            raise StartError("a port that is taken")

    with pytest.raises(StartError, match="a port that is taken"):
        await work()


@pytest.mark.parametrize("command", ["", "  ", "curl 'http://169.254.169.254"])
def test_a_command_that_cannot_be_read_is_named(command: str) -> None:
    with pytest.raises(StartError, match="BATCHWEAVE_NOTICE_COMMAND"):
        notice.words(command)
