"""What `up` does about a part that dies: start it again, unless it never comes to do its work."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from sqlalchemy import select

import service.up.ends as ends
import service.up.supervisor as supervisors
from service.db.drains import drain, resume
from service.db.sessions import Database
from service.db.tables import Slice, SliceStatus
from service.errors import StartError
from service.queue.leases import Leases
from service.queue.progress import Heartbeat
from service.settings import Settings
from service.up.engines import Engines, Model
from service.up.part import Part
from service.up.supervisor import Supervisor
from tests.integration.test_queue import make_slices


@pytest.fixture
def database_url(sqlite_url: str) -> str:
    """What is asked of it is the same on both."""
    return sqlite_url


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisors, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(supervisors, "ASK_S", 0.0)


async def watch(supervisor: Supervisor, until: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not until():
            await asyncio.to_thread(supervisor._watch)  # pyright: ignore[reportPrivateUsage]
            await asyncio.sleep(0.005)


async def test_an_engine_that_never_starts_ends_the_service_and_one_that_works_does_not(
    settings: Settings, redis: Redis, tmp_path: Path
) -> None:
    said: list[str] = []
    supervisor = Supervisor(Engines((Model(settings),)), said.append)
    part = Part("worker", ["sleep", "600"], tmp_path / "worker.log", supervisor.worker_name)
    part.start({"PATH": "/usr/bin:/bin"})
    supervisor._parts.append(part)  # pyright: ignore[reportPrivateUsage]
    # As an engine that dies again and again of what it is given: it works in between.
    stop = asyncio.Event()  # a cancel may be lost in the Redis client before Python 3.12
    beating = asyncio.create_task(beat(redis, supervisor.worker_name, part, stop))
    for restarts in range(2 * supervisors.MAX_EXITS):
        await watch(supervisor, lambda: part.running and part.begun)
        assert part.process
        part.process.kill()
        await watch(supervisor, lambda: len(said) > restarts)  # noqa: B023
    stop.set()
    await beating
    await redis.flushdb()
    part.command = ["sh", "-c", "exit 3"]
    with pytest.raises(StartError, match=r"worker died \d times in a row .* the last time: exit 3; .*worker\.log"):
        await watch(supervisor, lambda: False)


async def test_a_death_leaves_its_reason_and_the_return_is_said(
    settings: Settings, redis: Redis, tmp_path: Path
) -> None:
    said: list[str] = []
    supervisor = Supervisor(Engines((Model(settings),)), said.append)
    name = supervisor.worker_name
    script = 'echo \'{"level": "error", "event": "no memory", "error": "cudaMalloc"}\'; echo shuts down; kill -9 $$'
    part = Part("worker", ["sh", "-c", script], tmp_path / "worker.log", name)
    part.start({"PATH": "/usr/bin:/bin"})
    part.begun = True
    supervisor._parts.append(part)  # pyright: ignore[reportPrivateUsage]
    await Heartbeat(redis).beat(name, {"pid": 1})
    await watch(supervisor, lambda: len(said) == 1)
    words = "killed by SIGKILL: no memory: cudaMalloc"
    assert words in said[0]
    heartbeat = Heartbeat(redis)
    assert [(each.name, each.words) for each in await heartbeat.events() if each.kind == "exit"] == [(name, words)]
    assert await heartbeat.deaths() == 1
    assert await heartbeat.alive() == []  # at once
    part.command = ["sleep", "600"]
    stop = asyncio.Event()
    beating = asyncio.create_task(beat(redis, name, part, stop))
    await watch(supervisor, lambda: any("worker is back after " in each for each in said))
    stop.set()
    await beating
    assert part.process
    part.process.kill()


def a_worker(supervisor: Supervisor, script: str, tmp_path: Path) -> Part:
    part = Part("worker", ["sh", "-c", script], tmp_path / "worker.log", supervisor.worker_name)
    part.start({"PATH": "/usr/bin:/bin"})
    part.begun = True
    supervisor._parts.append(part)  # pyright: ignore[reportPrivateUsage]
    return part


async def test_what_a_dead_worker_held_is_free_at_once(
    settings: Settings, redis: Redis, database: Database, tmp_path: Path
) -> None:
    """Others wait for no lease: the batch's end may hang on these slices alone."""
    said: list[str] = []
    supervisor = Supervisor(Engines((Model(settings),)), said.append)
    mine, others = await make_slices(database, 2)
    assert await Leases(database, supervisor.worker_name, "m", 3600).claim(mine)
    assert await Leases(database, "another", "m", 3600).claim(others)
    a_worker(supervisor, "kill -9 $$", tmp_path)
    await watch(supervisor, lambda: len(said) > 0)
    async with database.read() as session:
        found = {each.id: (each.status, each.deaths) for each in await session.scalars(select(Slice))}
    assert found == {mine: (SliceStatus.READY, 1), others: (SliceStatus.LEASED, 0)}


async def test_a_drained_worker_that_is_stopped_stays_so_until_it_is_resumed(
    settings: Settings, redis: Redis, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisors, "HELD_S", 0.0)
    said: list[str] = []
    supervisor = Supervisor(Engines((Model(settings),)), said.append)
    async with database.write() as session:
        await drain(session, supervisor.worker_name, 0)
    part = a_worker(supervisor, "exit 0", tmp_path)
    await watch(supervisor, lambda: len(said) > 0)
    assert f"worker has stopped; `batchweave workers resume {part.worker}` starts it again" in said[0]
    part.command = ["sleep", "600"]
    for _ in range(3):
        await asyncio.to_thread(supervisor._watch)  # pyright: ignore[reportPrivateUsage]
    assert not part.running
    async with database.write() as session:
        await resume(session, supervisor.worker_name)
    await watch(supervisor, lambda: part.running)
    assert await Heartbeat(redis).deaths() == 0
    assert part.process
    part.process.kill()


async def test_a_death_that_cannot_be_noted_yet_is_noted_later(
    settings: Settings, redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis may be away, or be what died."""
    monkeypatch.setattr(ends, "NOTE_AGAIN_S", 0.0)
    noted, tries = ends.note_exit, list[str]()

    def note(client: Any, name: str, *more: Any) -> None:
        tries.append(name)
        if len(tries) < 3:
            raise ConnectionError
        noted(client, name, *more)

    monkeypatch.setattr(ends, "note_exit", note)
    supervisor = Supervisor(Engines((Model(settings),)), lambda _: None)
    part = Part("api", ["sh", "-c", "exit 5"], tmp_path / "api.log")
    part.start({"PATH": "/usr/bin:/bin"})
    part.begun = True
    supervisor._parts.append(part)  # pyright: ignore[reportPrivateUsage]
    await watch(supervisor, lambda: len(tries) >= 3)
    events = await Heartbeat(redis).events()
    assert (events[0].kind, events[0].name, events[0].words) == ("exit", "api", "exit 5")


async def beat(redis: Redis, name: str, part: Part, stop: asyncio.Event) -> None:
    while not stop.is_set():
        await Heartbeat(redis).beat(name, {"pid": part.process.pid if part.process else 0})
        await asyncio.sleep(0.01)


async def test_an_engine_that_dies_as_soon_as_it_has_begun_had_begun(
    settings: Settings, redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisors, "ASK_S", 1000.0)  # nobody has asked before it is dead
    said: list[str] = []
    supervisor = Supervisor(Engines((Model(settings),)), said.append)
    part = Part("worker", ["sh", "-c", "sleep 0.2; exit 3"], tmp_path / "worker.log", supervisor.worker_name)
    part.start({"PATH": "/usr/bin:/bin"})
    supervisor._parts.append(part)  # pyright: ignore[reportPrivateUsage]
    stop = asyncio.Event()
    beating = asyncio.create_task(beat(redis, supervisor.worker_name, part, stop))
    await watch(supervisor, lambda: len(said) >= 2 * supervisors.MAX_EXITS)
    stop.set()
    await beating
    assert part.exits == 1  # the last one, of an engine that had begun
