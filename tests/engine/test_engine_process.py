"""The process of an engine: what is asked there and comes back, and what a death of it says."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from benchmarks.engine_process import EngineDied, EngineProcess


class Holder:
    """Stands in for an engine, which takes seconds to start and cannot be made to fail at will."""

    def __init__(self, ended: Path) -> None:
        self.calls = 0
        self._ended = ended

    async def count(self, more: int = 1) -> int:
        self.calls += more
        return self.calls

    async def die(self, number: int) -> None:
        print("its last words", flush=True)
        os.kill(os.getpid(), number)

    def close(self) -> None:
        self._ended.touch()


Start = Callable[[], EngineProcess[Holder]]


@pytest.fixture
def start(tmp_path: Path) -> Generator[Start, None, None]:
    started: list[EngineProcess[Holder]] = []

    def run() -> EngineProcess[Holder]:
        ended = tmp_path / "ended"
        started.append(EngineProcess(lambda: Holder(ended), tmp_path / "engine.log", {"OF_THE_ENGINE": "yes"}))
        return started[-1]

    yield run
    for each in started:
        each.close()


def test_calls_and_closures_run_where_the_engine_lives(start: Start, tmp_path: Path) -> None:
    engine, number = start(), 5
    large = "x" * 3_000_000

    async def there(holder: Holder, text: str) -> tuple[int, int, str | None, str]:
        return await holder.count(number), os.getpid(), os.environ.get("OF_THE_ENGINE"), text

    assert engine.do(Holder.count) == 1
    assert engine.do(there, large) == (6, engine.pid, "yes", large)
    assert (engine.do(Holder.count, more=2), os.environ.get("OF_THE_ENGINE")) == (8, None)
    engine.close()
    assert (tmp_path / "ended").exists()
    assert not psutil.pid_exists(engine.pid)


def test_an_error_comes_back_and_the_engine_goes_on(start: Start) -> None:
    async def fail(_: Holder) -> None:
        raise ValueError("no such thing")

    async def disagree(holder: Holder) -> None:
        with pytest.raises(ValueError, match="never"):
            await holder.count()

    engine = start()
    with pytest.raises(ValueError, match="no such thing") as caught:
        engine.do(fail)
    assert "in fail" in caught.value.__notes__[0]
    with pytest.raises(BaseException, match="DID NOT RAISE"):
        engine.do(disagree)
    assert engine.do(Holder.count) == 2


def test_an_engine_whose_end_fails_is_no_success(tmp_path: Path) -> None:
    class Fails(Holder):
        def close(self) -> None:
            raise ValueError("cannot end")

    engine = EngineProcess(lambda: Fails(tmp_path), tmp_path / "engine.log")
    with pytest.raises(EngineDied, match=r"with exit code 1(?s:.*)cannot end"):
        engine.close()


def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    def make() -> Holder:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        EngineProcess(make, tmp_path / "engine.log")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGQUIT])
def test_each_call_of_a_dead_engine_names_its_death(start: Start, number: signal.Signals) -> None:
    engine, other = start(), start()
    for call in (lambda: engine.do(Holder.die, number), lambda: engine.do(Holder.count)):
        with pytest.raises(EngineDied, match=f"died by {number.name}.*(?s:.*)its last words"):
            call()
    assert other.do(Holder.count) == 1


def test_a_call_that_is_interrupted_ends_the_engine(start: Start) -> None:
    """Its answer would be taken for that of the next call."""

    async def sleep(_: Holder) -> None:
        await asyncio.sleep(600)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    engine, before = start(), signal.signal(signal.SIGUSR1, interrupt)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            engine.do(sleep)
    finally:
        signal.signal(signal.SIGUSR1, before)
    with pytest.raises(EngineDied, match="interrupted"):
        engine.do(Holder.count)


OWNER = """
import asyncio, sys
from pathlib import Path
from benchmarks.engine_process import EngineProcess
from tests.engine.test_engine_process import Holder

async def stay(_: Holder) -> None:
    await asyncio.sleep(600)

engine = EngineProcess(lambda: Holder(Path(sys.argv[1]) / "ended"), Path(sys.argv[1]) / "engine.log")
print(engine.pid, flush=True)
engine.do(stay)
"""


@pytest.mark.slow
def test_an_engine_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """Also when that one is killed while the engine works for it."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    engine = psutil.Process(int(owner.stdout.readline()))
    owner.kill()
    owner.wait()
    with suppress(psutil.NoSuchProcess):
        engine.wait(60)
    assert not engine.is_running()
