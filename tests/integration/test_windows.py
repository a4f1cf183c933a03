"""When requests are planned, and that those which no engine has are planned again with what came since."""

import asyncio
from collections import Counter

import pytest
from sqlalchemy import func, select

from engine_ext.plan.pools import HOUR_S
from service.db.moves import move_batch
from service.db.tables import BatchStatus, Slice, SliceBatch, SliceStatus, Window
from service.jobs import planner
from service.jobs.planner import Planner
from service.jobs.unleased import Unleased
from service.objects.plan_artifact import PlanArtifact
from service.queue.connection import open_redis
from service.queue.crew import CrewBoard, Hand
from service.queue.leases import Leases
from service.settings import Settings
from tests.integration.harness import Harness, ScriptedEngine, jsonl, line

pytestmark = pytest.mark.dialects

DAY_S = 24 * 3600
WAIT_S = 30


def patient(harness: Harness, **changes: object) -> Harness:
    harness.settings = Settings.model_validate({**harness.settings.model_dump(), "window_wait_s": WAIT_S, **changes})
    return harness


async def submit(harness: Harness, first: int, count: int, window_s: int = DAY_S) -> str:
    return await harness.submit(jsonl(line(number) for number in range(first, first + count)), window_s)


async def requests_of(harness: Harness) -> Counter[tuple[str, int]]:
    """How often each request of each batch is in a slice."""
    found = Counter[tuple[str, int]]()
    async with harness.database.read() as session:
        columns = (Slice.first, Slice.count, Window.plan_id)
        slices = (await session.execute(select(*columns).join(Window, Window.id == Slice.window_id))).all()
    for first, count, plan_id in slices:
        artifact = PlanArtifact(harness.storage, plan_id)
        header = await artifact.header()
        found.update((header.batches[b], r) for b, r in (await artifact.places(first, count)).tolist())
    return found


async def books_are_right(harness: Harness, *batch_ids: str) -> None:
    """Each request is in one slice, and rows count the slices as they are."""
    batches = [await harness.batch(batch_id) for batch_id in batch_ids]
    wanted = [(batch.id, number) for batch in batches for number in range(batch.planned)]
    assert await requests_of(harness) == Counter(wanted)
    for batch in batches:
        async with harness.database.read() as session:
            mine = select(func.count(), func.sum(SliceBatch.total)).where(SliceBatch.batch_id == batch.id)
            slices, total = (await session.execute(mine)).one()
            left = await session.scalar(
                select(func.count()).where(SliceBatch.batch_id == batch.id, SliceBatch.status != SliceStatus.DONE)
            )
        assert (batch.slices, batch.slices_left, batch.planned) == (slices, left, total)


async def test_requests_wait_for_others_while_engines_have_work(harness: Harness) -> None:
    patient(harness)
    first = await submit(harness, 0, 16)
    await harness.plan()
    assert (await harness.batch(first)).planned == 16  # nothing else was there to run
    second = await submit(harness, 100, 16)
    await harness.plan()
    harness.clock.now += 10
    third = await submit(harness, 200, 16)
    await harness.plan()
    assert [(await harness.batch(each)).planned for each in (second, third)] == [0, 0]
    harness.clock.now += WAIT_S - 10
    await harness.plan()  # with the third, though that has waited for less
    assert [(await harness.batch(each)).planned for each in (second, third)] == [16, 16]
    await books_are_right(harness, first, second, third)


async def test_requests_do_not_wait_once_engines_have_taken_all_others(harness: Harness) -> None:
    patient(harness)
    await submit(harness, 0, 16)
    await harness.plan()
    second = await submit(harness, 100, 16)
    await harness.plan()
    leases = Leases(harness.database, "w", "test-model", 30)
    async with harness.database.read() as session:
        slices = list(await session.scalars(select(Slice.id)))
    for slice_id in slices[:-1]:
        assert await leases.claim(slice_id)
    await harness.plan()
    assert (await harness.batch(second)).planned == 0
    assert await leases.claim(slices[-1])
    await harness.plan()
    assert (await harness.batch(second)).planned == 16


async def test_a_near_deadline_does_not_wait(harness: Harness) -> None:
    patient(harness)
    await submit(harness, 0, 16)
    await harness.plan()
    urgent = await submit(harness, 100, 16, int(HOUR_S) - 60)
    await harness.plan()
    assert (await harness.batch(urgent)).planned == 16


async def test_a_full_window_does_not_wait(harness: Harness) -> None:
    patient(harness, window_requests=20)
    await submit(harness, 0, 16)
    await harness.plan()
    second = await submit(harness, 100, 16)
    await harness.plan()
    assert (await harness.batch(second)).planned == 0
    third = await submit(harness, 200, 16)
    await harness.plan()
    assert (await harness.batch(second)).planned + (await harness.batch(third)).planned >= 20


async def test_what_no_engine_has_is_planned_again_with_what_comes(harness: Harness) -> None:
    first = await submit(harness, 0, 40)
    await harness.plan()
    second = await submit(harness, 100, 40)
    await harness.plan()
    await books_are_right(harness, first, second)
    async with harness.database.read() as session:
        [window] = await session.scalars(select(Slice.window_id).distinct())
        assert window == await session.scalar(select(func.max(Window.id)))
    engine = ScriptedEngine()
    async with harness.working(engine):
        batches = await harness.until_ended(first, second)
    assert [batch.completed for batch in batches] == [40, 40]
    assert set(engine.runs.values()) == {1}


async def test_what_an_engine_has_or_had_stays(harness: Harness) -> None:
    first = await submit(harness, 0, 40)
    await harness.plan()
    leases = Leases(harness.database, "w", "test-model", 30)
    async with harness.database.read() as session:
        held, had, *_ = await session.scalars(select(Slice.id).order_by(Slice.id))
    assert await leases.claim(held)
    lease = await leases.claim(had)
    assert lease is not None
    assert await leases.give_back(lease, [])  # it may have answers
    second = await submit(harness, 100, 40)
    await harness.plan()
    await books_are_right(harness, first, second)
    async with harness.database.read() as session:
        assert {held, had} <= set(await session.scalars(select(Slice.id)))


async def test_few_new_requests_do_not_plan_many_again(harness: Harness) -> None:
    first = await submit(harness, 0, 80)
    await harness.plan()
    second = await submit(harness, 100, 19)
    await harness.plan()
    await books_are_right(harness, first, second)
    async with harness.database.read() as session:
        assert len(list(await session.scalars(select(Slice.window_id).distinct()))) == 2


async def test_what_does_not_fit_a_window_is_not_planned_again(harness: Harness) -> None:
    first = await submit(harness, 0, 40)
    await harness.plan()
    tokens = (await harness.batch(first)).prompt_tokens
    patient(harness, window_wait_s=0, window_tokens=tokens + 10)
    second = await submit(harness, 100, 30)
    await harness.plan()
    await books_are_right(harness, first, second)
    async with harness.database.read() as session:
        assert len(list(await session.scalars(select(Slice.window_id).distinct()))) == 2


async def test_requests_of_a_batch_that_ends_are_left_out(harness: Harness) -> None:
    first, other = await submit(harness, 0, 40), await submit(harness, 50, 40)
    await harness.plan()
    async with harness.database.write() as session:
        assert await move_batch(session, first, BatchStatus.CANCELLING, now=harness.clock())
    second = await submit(harness, 100, 40)
    await harness.plan()
    assert {batch for batch, _ in await requests_of(harness)} == {other, second}
    async with harness.working(ScriptedEngine()):
        cancelled, *batches = await harness.until_ended(first, other, second)
    assert (cancelled.status, cancelled.failed) == ("cancelled", 0)
    assert [batch.completed for batch in batches] == [40, 40]


async def test_a_slice_that_is_leased_meanwhile_stays_and_nothing_is_lost(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await submit(harness, 0, 40)
    await harness.plan()
    found, leases = planner.unleased, Leases(harness.database, "w", "test-model", 30)

    async def and_lease(*given: object) -> Unleased:
        before = await found(*given)  # type: ignore[arg-type]
        assert await leases.claim(before.slices[0])
        monkeypatch.setattr(planner, "unleased", found)
        return before

    monkeypatch.setattr(planner, "unleased", and_lease)
    second = await submit(harness, 100, 40)
    while await harness.validator.run_once():
        pass
    await harness.planner.run_once()
    assert (await harness.batch(second)).planned == 40  # at once, without what came before
    assert len(await harness.storage.folders("plans")) == 2  # the plan that was given up is gone
    await books_are_right(harness, first, second)


async def test_an_id_that_a_worker_was_told_of_never_means_another_slice(harness: Harness) -> None:
    told, batches = dict[int, int](), list[str]()
    for number in range(4):
        batches.append(await submit(harness, 100 * number, 24 - 4 * number))  # few enough for ids to come again
        await harness.plan()
        async with harness.database.read() as session:
            now = dict((await session.execute(select(Slice.id, Slice.window_id))).tuples().all())
        assert all(told.get(slice_id, window_id) == window_id for slice_id, window_id in now.items())
        told |= now
    await books_are_right(harness, *batches)


async def test_planners_and_workers_side_by_side_answer_every_request_once(harness: Harness) -> None:
    engine, batch_ids = ScriptedEngine(), list[str]()
    async with harness.working(engine, in_flight=8):
        for number in range(6):
            batch_ids.append(await submit(harness, 1000 * number, 24))
            while await harness.validator.run_once():
                pass
            await asyncio.gather(*(harness.planner.run_once() for _ in range(3)), harness.reconciler.run_once())
        while any([await harness.planner.run_once() for _ in range(2)]):
            pass
        batches = await harness.until_ended(*batch_ids)
    assert [batch.completed for batch in batches] == [24] * 6
    assert set(engine.runs.values()) == {1}
    for batch in batches:
        await harness.results(batch)


async def test_expectations_of_a_batch_count_each_request_once(harness: Harness) -> None:
    first = await submit(harness, 0, 40)
    await harness.plan()
    before = await harness.batch(first)
    await submit(harness, 100, 40)
    await harness.plan()
    after = await harness.batch(first)
    assert after.planned_output_tokens == before.planned_output_tokens


@pytest.mark.parametrize(("workers", "slices"), [(0, [256, 256]), (1, [256, 256]), (2, [32] * 16), (30, [16] * 32)])
async def test_each_of_several_workers_gets_several_slices(harness: Harness, workers: int, slices: list[int]) -> None:
    patient(harness, slice_requests=256)
    board = CrewBoard(harness.redis, "test-model")
    for number in range(workers):
        await board.look(f"w{number}", Hand(0, 0.0, 16))
    batch_id = await submit(harness, 0, 512)
    await harness.plan()
    async with harness.database.read() as session:
        counts = (await session.scalars(select(Slice.count).order_by(Slice.id))).all()
    assert list(counts) == slices
    await books_are_right(harness, batch_id)


async def test_a_window_is_planned_for_one_worker_without_redis(harness: Harness) -> None:
    patient(harness, slice_requests=256)
    await submit(harness, 0, 512)
    while await harness.validator.run_once():
        pass
    nowhere = open_redis("unix:///nowhere.sock")
    assert await Planner(harness.database, harness.storage, harness.settings, harness.clock, nowhere).run_once()
    async with harness.database.read() as session:
        assert (await session.scalars(select(Slice.count))).all() == [256, 256]
