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
from tests.integration.harness import Harness, ScriptedEngine, jsonl, line
from tests.waiting import until

pytestmark = pytest.mark.dialects

DAY_S = 24 * 3600


async def slices_of(harness: Harness, batch_id: str) -> list[int]:
    async with harness.database.read() as session:
        mine = select(SliceBatch.slice_id).where(SliceBatch.batch_id == batch_id).order_by(SliceBatch.slice_id)
        return list(await session.scalars(mine))


async def first(harness: Harness, most: int = 1000) -> list[int]:
    return [each.slice_id for each in await Turns().most_urgent(harness.database, "test-model", harness.clock(), most)]


async def planned(harness: Harness, window_s: int, count: int = 16, work_s: float = 0.0) -> tuple[str, list[int]]:
    """A batch with its slices, and as much work as is said."""
    batch_id = await harness.submit(jsonl(line(n) for n in range(count)), window_s)
    await harness.plan()
    async with harness.database.write() as session:
        mine = update(Batch).where(Batch.id == batch_id)
        await session.execute(mine.values(planned_compute_s=work_s, planned_memory_s=0.0))
        await session.execute(mine.values(urgent_at=urgent_at(Batch.planned + 0)))
    return batch_id, await slices_of(harness, batch_id)


@pytest.mark.usefixtures("windows_apart")
async def test_least_slack_comes_first_in_the_order_of_plans(harness: Harness) -> None:
    _, late = await planned(harness, DAY_S)
    _, soon = await planned(harness, 600)
    _, also_late = await planned(harness, DAY_S - 60)
    assert await first(harness) == [*soon, *late, *also_late]
    assert await first(harness, 3) == [*soon, late[0]]
    harness.clock.now += DAY_S - 1800  # half an hour is left of both
    assert await first(harness) == [*soon, *late, *also_late]


@pytest.mark.usefixtures("windows_apart")
async def test_work_that_remains_takes_slack_away(harness: Harness) -> None:
    _, two_hours = await planned(harness, int(2 * HOUR_S))
    batch_id, much = await planned(harness, int(8 * HOUR_S), work_s=7.5 * HOUR_S)
    assert await first(harness) == [*much, *two_hours]
    leases = Leases(harness.database, "w", "test-model", 30)  # half of it is done
    lease = await leases.claim(much[0])
    assert lease is not None
    assert await leases.finish(lease, {batch_id: Counts(completed=8)}, [])
    assert await first(harness) == [*two_hours, *much[1:]]
    async with harness.database.write() as session:
        await session.execute(update(Batch).where(Batch.id == batch_id).values(status="cancelled"))
    assert await first(harness) == two_hours


async def test_urgent_batch_overtakes_what_was_planned_before(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (announcements, reconciler):
        monkeypatch.setattr(module, "MOST_ANNOUNCED", 2)
    late, _ = await planned(harness, DAY_S, count=80)
    urgent = await harness.submit(jsonl(line(n) for n in range(1000, 1016)), 600)
    await harness.plan()
    engine = ScriptedEngine()
    async with harness.working(engine, in_flight=8):
        await harness.until_ended(late, urgent)
    order = [int(content.removeprefix("request ")) for content in engine.runs]
    last_urgent = max(place for place, number in enumerate(order) if number >= 1000)
    assert len(order) == 96
    assert last_urgent < 8 * (1 + 2), "one may be running; then the urgent ones, before what was announced already"


async def are_in_flight(harness: Harness, engine: ScriptedEngine, count: int, first: int = 0) -> bool:
    """Whether so many requests from this number on have come to the engine."""
    await harness.reconciler.run_once()
    return sum(int(content.split()[1]) >= first for content in engine.runs) >= count


async def test_an_urgent_slice_is_leased_while_the_engine_is_full(harness: Harness) -> None:
    """What is in flight is bounded by urgency: a day's batch that fills the engine holds up no batch of minutes."""
    release = asyncio.Event()
    engine = ScriptedEngine(hold=release)
    day = [await harness.submit(jsonl(line(n) for n in range(64)), DAY_S)]
    await harness.plan()
    async with harness.working(engine, in_flight=16):
        await until(lambda: are_in_flight(harness, engine, 16))
        soon = await harness.submit(jsonl(line(1000 + n) for n in range(4)), 600)
        await harness.plan()

        await until(lambda: are_in_flight(harness, engine, 4, first=1000))

        assert sum(engine.runs.values()) < 64
        release.set()
        ended = await harness.until_ended(*day, soon)
    assert [batch.completed for batch in ended] == [64, 4]


async def test_slices_as_urgent_as_those_in_flight_wait_for_room(harness: Harness) -> None:
    release = asyncio.Event()
    engine = ScriptedEngine(hold=release)
    batch = await harness.submit(jsonl(line(n) for n in range(64)), 600)
    await harness.plan()
    async with harness.working(engine, in_flight=16):
        await until(lambda: are_in_flight(harness, engine, 16))
        await asyncio.sleep(2.5)  # two looks at the next slice

        assert len(engine.runs) < 40
        release.set()
        await harness.until_ended(batch)
