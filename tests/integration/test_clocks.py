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
from tests.integration.house import House, ScriptedEngine, jsonl, line

HOUR_S = 3600.0


async def slices(house: House) -> list[Slice]:
    async with house.database.read() as session:
        return list((await session.scalars(select(Slice))).all())


@pytest.mark.parametrize("shift_s", [HOUR_S, -HOUR_S])
async def test_wrong_clocks_end_no_lease(house: House, shift_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planner an hour ahead took every lease at once, and what ran for longer was refused after a few such deaths."""
    batch_id = await house.submit(jsonl(line(n) for n in range(20)))
    await house.plan()
    real, now = time.time, house.clock.now
    monkeypatch.setattr(time, "time", lambda: real() + shift_s)
    house.clock.now = now + shift_s
    engine = ScriptedEngine(hold=asyncio.Event())
    async with house.working(engine):
        await house.until(lambda: all_are_leased(house))
        house.clock.now = now - shift_s  # the planner's, against the worker's
        for _ in range(5):
            await house.reconciler.run_once()
        assert {each.status for each in await slices(house)} == {SliceStatus.LEASED}
        assert engine.hold is not None
        engine.hold.set()
        house.clock.now = now
        [batch] = await house.until_ended(batch_id)
    assert (batch.completed, batch.failed) == (20, 0)
    assert {each.deaths for each in await slices(house)} == {0}
    assert max(each.epoch for each in await slices(house)) == 1


async def all_are_leased(house: House) -> bool:
    return all(each.status == SliceStatus.LEASED for each in await slices(house))


async def test_an_expired_lease_alone_is_no_death(house: House) -> None:
    await house.submit(jsonl(line(n) for n in range(4)))
    await house.plan()
    leases, beats = Leases(house.database, "w", "test-model", 30), Heartbeat(house.redis)
    for alive, deaths in ((True, 0), (True, 0), (False, 1)):
        assert await leases.claim(1)
        await pass_lease(house)
        await (beats.beat("w", {"name": "w", "model": "m"}) if alive else house.redis.flushall())
        await house.reconciler.run_once()
        [found] = await slices(house)
        assert (found.status, found.deaths) == (SliceStatus.READY, deaths)


async def pass_lease(house: House) -> None:
    async with house.database.write() as session:
        await session.execute(update(Slice).values(lease_until=1.0))


async def test_nobody_counts_as_dead_while_redis_is_away(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    await house.submit(jsonl(line(n) for n in range(4)))
    await house.plan()
    assert await Leases(house.database, "w", "test-model", 30).claim(1)
    await pass_lease(house)

    async def away(*_: object) -> set[str]:
        raise ConnectionError

    monkeypatch.setattr(Heartbeat, "beating", away)
    await house.reconciler.run_once()
    [found] = await slices(house)
    assert (found.status, found.deaths) == (SliceStatus.READY, 0)


async def test_an_absurd_lease_is_shortened_and_said(house: House, capsys: pytest.CaptureFixture[str]) -> None:
    """As if the database's clock had been an hour ahead when it was given."""
    await house.submit(jsonl(line(n) for n in range(4)))
    await house.plan()
    assert await Leases(house.database, "w", "test-model", 30).claim(1)
    async with house.database.write() as session:
        await session.execute(update(Slice).values(lease_until=Slice.lease_until + HOUR_S))
    await Reconciler(house.database, house.redis, 30, house.clock).run_once()
    [found] = await slices(house)
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
