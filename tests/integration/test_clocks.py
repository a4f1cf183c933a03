"""No host's clock ends a lease, deletes an object, or makes a signature wrong: time is the database's."""

import asyncio
import time

import pytest
from sqlalchemy import select, update

from service.db.clock import SharedClock
from service.db.sessions import Database
from service.db.tables import Slice, SliceStatus
from service.jobs.reconciler import Reconciler
from service.queue.leases import Leases
from service.queue.progress import Heartbeat
from tests.integration.harness import Harness, ScriptedEngine, jsonl, line
from tests.waiting import until

pytestmark = pytest.mark.dialects

HOUR_S = 3600.0


async def slices(harness: Harness) -> list[Slice]:
    async with harness.database.read() as session:
        return list((await session.scalars(select(Slice))).all())


@pytest.mark.parametrize("shift_s", [HOUR_S, -HOUR_S])
async def test_wrong_clocks_end_no_lease(harness: Harness, shift_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planner an hour ahead took every lease at once, and what ran for longer was refused after a few such deaths."""
    batch_id = await harness.submit(jsonl(line(n) for n in range(20)))
    await harness.plan()
    real, now = time.time, harness.clock.now
    monkeypatch.setattr(time, "time", lambda: real() + shift_s)
    harness.clock.now = now + shift_s
    engine = ScriptedEngine(hold=asyncio.Event())
    async with harness.working(engine):
        await until(lambda: all_are_leased(harness))
        harness.clock.now = now - shift_s  # the planner's, against the worker's
        for _ in range(5):
            await harness.reconciler.run_once()
        assert {each.status for each in await slices(harness)} == {SliceStatus.LEASED}
        assert engine.hold is not None
        engine.hold.set()
        harness.clock.now = now
        [batch] = await harness.until_ended(batch_id)
    assert (batch.completed, batch.failed) == (20, 0)
    assert {each.deaths for each in await slices(harness)} == {0}
    assert max(each.epoch for each in await slices(harness)) == 1


async def all_are_leased(harness: Harness) -> bool:
    return all(each.status == SliceStatus.LEASED for each in await slices(harness))


async def test_an_expired_lease_alone_is_no_death(harness: Harness) -> None:
    await harness.submit(jsonl(line(n) for n in range(4)))
    await harness.plan()
    leases, beats = Leases(harness.database, "w", "test-model", 30), Heartbeat(harness.redis)
    for alive, deaths in ((True, 0), (True, 0), (False, 1)):
        assert await leases.claim(1)
        await pass_lease(harness)
        await (beats.beat("w", {"name": "w", "model": "m"}) if alive else harness.redis.flushall())
        await harness.reconciler.run_once()
        [found] = await slices(harness)
        assert (found.status, found.deaths) == (SliceStatus.READY, deaths)


async def pass_lease(harness: Harness) -> None:
    async with harness.database.write() as session:
        await session.execute(update(Slice).values(lease_until=1.0))


async def test_nobody_counts_as_dead_while_redis_is_away(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    await harness.submit(jsonl(line(n) for n in range(4)))
    await harness.plan()
    assert await Leases(harness.database, "w", "test-model", 30).claim(1)
    await pass_lease(harness)

    async def away(*_: object) -> set[str]:
        raise ConnectionError

    monkeypatch.setattr(Heartbeat, "beating", away)
    await harness.reconciler.run_once()
    [found] = await slices(harness)
    assert (found.status, found.deaths) == (SliceStatus.READY, 0)


async def test_an_absurd_lease_is_shortened_and_said(harness: Harness, capsys: pytest.CaptureFixture[str]) -> None:
    """As if the database's clock had been an hour ahead when it was given."""
    await harness.submit(jsonl(line(n) for n in range(4)))
    await harness.plan()
    assert await Leases(harness.database, "w", "test-model", 30).claim(1)
    async with harness.database.write() as session:
        await session.execute(update(Slice).values(lease_until=Slice.lease_until + HOUR_S))
    await Reconciler(harness.database, harness.redis, 30, harness.clock).run_once()
    [found] = await slices(harness)
    assert found.lease_until is not None
    assert found.lease_until < time.time() + 60
    assert "clock was set back" in capsys.readouterr().out


async def test_the_shared_clock_is_the_databases(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + HOUR_S)
    clock = SharedClock(database)
    assert clock() - real() == pytest.approx(HOUR_S, abs=30)
    await clock.sync()
    assert clock() - real() == pytest.approx(0, abs=30)
