"""What has the least slack runs first, also when it came last."""

import asyncio

import pytest
from sqlalchemy import select, update

from engine_ext.plan.pools import HOUR_S
from service.db.tables import Batch, SliceBatch
from service.jobs import reconciler
from service.queue import announcements
from service.queue.counts import Counts
from service.queue.leases import Leases
from service.queue.urgency import Turns, urgent_at
from tests.integration.house import House, ScriptedEngine, jsonl, line

DAY_S = 24 * 3600


async def slices_of(house: House, batch_id: str) -> list[int]:
    async with house.database.read() as session:
        mine = select(SliceBatch.slice_id).where(SliceBatch.batch_id == batch_id).order_by(SliceBatch.slice_id)
        return list(await session.scalars(mine))


async def first(house: House, most: int = 1000) -> list[int]:
    return [each.slice_id for each in await Turns().most_urgent(house.database, "test-model", house.clock(), most)]


async def planned(house: House, window_s: int, count: int = 16, work_s: float = 0.0) -> tuple[str, list[int]]:
    """A batch with its slices, and as much work as is said."""
    batch_id = await house.submit(jsonl(line(n) for n in range(count)), window_s)
    await house.plan()
    async with house.database.write() as session:
        mine = update(Batch).where(Batch.id == batch_id)
        await session.execute(mine.values(planned_compute_s=work_s, planned_memory_s=0.0))
        await session.execute(mine.values(urgent_at=urgent_at(Batch.planned + 0)))
    return batch_id, await slices_of(house, batch_id)


@pytest.mark.usefixtures("windows_apart")
async def test_least_slack_comes_first_in_the_order_of_plans(house: House) -> None:
    _, late = await planned(house, DAY_S)
    _, soon = await planned(house, 600)
    _, also_late = await planned(house, DAY_S - 60)
    assert await first(house) == [*soon, *late, *also_late]
    assert await first(house, 3) == [*soon, late[0]]
    house.clock.now += DAY_S - 1800  # half an hour is left of both
    assert await first(house) == [*soon, *late, *also_late]


@pytest.mark.usefixtures("windows_apart")
async def test_work_that_remains_takes_slack_away(house: House) -> None:
    _, two_hours = await planned(house, int(2 * HOUR_S))
    batch_id, much = await planned(house, int(8 * HOUR_S), work_s=7.5 * HOUR_S)
    assert await first(house) == [*much, *two_hours]
    leases = Leases(house.database, "w", "test-model", 30)  # half of it is done
    lease = await leases.claim(much[0])
    assert lease is not None
    assert await leases.finish(lease, {batch_id: Counts(completed=8)})
    assert await first(house) == [*two_hours, *much[1:]]
    async with house.database.write() as session:
        await session.execute(update(Batch).where(Batch.id == batch_id).values(status="cancelled"))
    assert await first(house) == two_hours


async def test_urgent_batch_overtakes_what_was_planned_before(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (announcements, reconciler):
        monkeypatch.setattr(module, "MOST_ANNOUNCED", 2)
    late, _ = await planned(house, DAY_S, count=80)
    urgent = await house.submit(jsonl(line(n) for n in range(1000, 1016)), 600)
    await house.plan()
    engine = ScriptedEngine()
    async with house.working(engine, in_flight=8):
        await house.until_ended(late, urgent)
    order = [int(content.removeprefix("request ")) for content in engine.runs]
    last_urgent = max(place for place, number in enumerate(order) if number >= 1000)
    assert len(order) == 96
    assert last_urgent < 8 * (1 + 2), "one may be running; then the urgent ones, before what was announced already"


async def are_in_flight(house: House, engine: ScriptedEngine, count: int, first: int = 0) -> bool:
    """Whether so many requests from this number on have come to the engine."""
    await house.reconciler.run_once()
    return sum(int(content.split()[1]) >= first for content in engine.runs) >= count


async def test_an_urgent_slice_is_leased_while_the_engine_is_full(house: House) -> None:
    """What is in flight is bounded by urgency: a day's batch that fills the engine holds up no batch of minutes."""
    release = asyncio.Event()
    engine = ScriptedEngine(hold=release)
    day = [await house.submit(jsonl(line(n) for n in range(64)), DAY_S)]
    await house.plan()
    async with house.working(engine, in_flight=16):
        await house.until(lambda: are_in_flight(house, engine, 16))
        soon = await house.submit(jsonl(line(1000 + n) for n in range(4)), 600)
        await house.plan()

        await house.until(lambda: are_in_flight(house, engine, 4, first=1000))

        assert sum(engine.runs.values()) < 64
        release.set()
        ended = await house.until_ended(*day, soon)
    assert [batch.completed for batch in ended] == [64, 4]


async def test_slices_as_urgent_as_those_in_flight_wait_for_room(house: House) -> None:
    release = asyncio.Event()
    engine = ScriptedEngine(hold=release)
    batch = await house.submit(jsonl(line(n) for n in range(64)), 600)
    await house.plan()
    async with house.working(engine, in_flight=16):
        await house.until(lambda: are_in_flight(house, engine, 16))
        await asyncio.sleep(2.5)  # two looks at the next slice

        assert len(engine.runs) < 40
        release.set()
        await house.until_ended(batch)
