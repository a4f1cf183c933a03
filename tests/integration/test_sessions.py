"""What a connection to PostgreSQL is set to, whatever becomes of its transactions."""

import asyncio
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis
from sqlalchemy import make_url, text

from service.db.lost_sessions import end_lost_sessions
from service.db.sessions import READS_EACH, Database, reader
from service.jobs import runner
from service.objects.storage import Storage
from service.settings import Settings
from tests.conftest import Clock
from tests.integration.serving import serve

pytestmark = pytest.mark.dialects


async def test_a_client_that_is_gone_holds_its_locks_for_a_minute(database: Database) -> None:
    """PostgreSQL sees to that itself, where the client is gone between two statements."""
    if database.engine.dialect.name != "postgresql":
        pytest.skip("SQLite has no clients that are elsewhere")
    for _ in range(3):
        async with database.write() as session:
            await session.execute(text("SELECT 1"))
            await session.rollback()
    async with database.read() as session:
        assert await session.scalar(text("SHOW idle_in_transaction_session_timeout")) == "1min"


@pytest.mark.parametrize("inside_a_statement", [True, False])
async def test_a_client_that_is_gone_loses_its_locks(database: Database, inside_a_statement: bool) -> None:
    """Also one that was cut off between the two messages with which asyncpg runs a statement for the first time."""
    if database.engine.dialect.name != "postgresql":
        pytest.skip("SQLite has no clients that are elsewhere")

    async def is_free() -> bool:
        async with database.write() as session:
            return bool(await session.scalar(text("SELECT pg_try_advisory_xact_lock(7)")))

    lost, idle = await database.engine.raw_connection(), await database.engine.raw_connection()
    foreign = await database.engine.raw_connection()
    stranger: Any = foreign.driver_connection
    await stranger.execute("SET application_name = 'psql'")
    await stranger.execute("BEGIN")
    await stranger.prepare("SELECT 2")
    client: Any = lost.driver_connection
    await client.execute("BEGIN")
    await client.execute("SELECT pg_advisory_xact_lock(7)")
    if inside_a_statement:
        await client.prepare("SELECT 2")
    assert not await is_free()
    assert await end_lost_sessions(database) == 0  # it may still come back
    async with asyncio.timeout(60):
        while not (ended := await end_lost_sessions(database, lost_s=0)):  # until the server waits for its client
            await asyncio.sleep(0.05)
    assert ended == 1
    async with asyncio.timeout(60):
        while not await is_free():
            await asyncio.sleep(0.05)
    client = idle.driver_connection
    assert await client.fetchval("SELECT 1") == 1
    assert await stranger.fetchval("SELECT 1") == 1
    for each in (lost, idle, foreign):
        each.invalidate()


async def test_the_planner_looks_for_lost_sessions(
    database: Database, storage: Storage, redis: Redis, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    if database.engine.dialect.name != "postgresql":
        pytest.skip("SQLite has no clients that are elsewhere")
    monkeypatch.setattr(runner, "LOST_S", 0.1)
    lost = await database.engine.raw_connection()
    client: Any = lost.driver_connection
    await client.execute("BEGIN")
    await client.prepare("SELECT 2")
    stop = asyncio.Event()
    hasty = settings.model_copy(update={"database_timeout_s": 0.05})
    jobs = asyncio.create_task(runner.run_jobs(database, storage, redis, hasty, stop))
    async with asyncio.timeout(60):
        while not client.is_closed():
            await asyncio.sleep(0.05)
    assert client.is_closed(), "the planner ended it"
    stop.set()
    await jobs
    lost.invalidate()


async def test_a_server_that_refuses_a_connection_counts_as_away(settings: Settings, clock: Clock) -> None:
    """As one does that starts again: clients are told to try later."""
    assert settings.database_url is not None
    if settings.database_url.startswith("sqlite"):
        pytest.skip("SQLite has no server")
    url = make_url(settings.database_url).set(database="there-is-none").render_as_string(hide_password=False)
    with serve(settings.model_copy(update={"database_url": url}), clock) as api:
        answer = httpx.get(f"{api}/v1/batches")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "database_unavailable")


async def test_one_reader_leaves_a_connection_to_others(database: Database) -> None:
    go, reads = asyncio.Event(), 0

    async def read(whose: str, until: asyncio.Event | None) -> None:
        nonlocal reads
        reader.set(whose)
        async with database.read() as session:
            await session.execute(text("SELECT 1"))
            reads += 1
            if until is not None:
                await until.wait()

    flood = [asyncio.create_task(read("a", go)) for _ in range(50)]
    try:
        async with asyncio.timeout(60):
            while reads < READS_EACH:
                await asyncio.sleep(0.01)
            for whose in ("b", "c", ""):
                await asyncio.create_task(read(whose, None))
        assert reads == READS_EACH + 3
    finally:
        go.set()
        await asyncio.gather(*flood)
    assert reads == 50 + 3
