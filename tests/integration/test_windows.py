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
from tests.integration.house import House, ScriptedEngine, jsonl, line

DAY_S = 24 * 3600
WAIT_S = 30


def patient(house: House, **changes: object) -> House:
    house.settings = Settings.model_validate({**house.settings.model_dump(), "window_wait_s": WAIT_S, **changes})
    return house


async def submit(house: House, first: int, count: int, window_s: int = DAY_S) -> str:
    return await house.submit(jsonl(line(number) for number in range(first, first + count)), window_s)


async def requests_of(house: House) -> Counter[tuple[str, int]]:
    """How often each request of each batch is in a slice."""
    found = Counter[tuple[str, int]]()
    async with house.database.read() as session:
        columns = (Slice.first, Slice.count, Window.plan_id)
        slices = (await session.execute(select(*columns).join(Window, Window.id == Slice.window_id))).all()
    for first, count, plan_id in slices:
        artifact = PlanArtifact(house.storage, plan_id)
        header = await artifact.header()
        found.update((header.batches[b], r) for b, r in (await artifact.places(first, count)).tolist())
    return found


async def books_are_right(house: House, *batch_ids: str) -> None:
    """Each request is in one slice, and rows count the slices as they are."""
    batches = [await house.batch(batch_id) for batch_id in batch_ids]
    wanted = [(batch.id, number) for batch in batches for number in range(batch.planned)]
    assert await requests_of(house) == Counter(wanted)
    for batch in batches:
        async with house.database.read() as session:
            mine = select(func.count(), func.sum(SliceBatch.total)).where(SliceBatch.batch_id == batch.id)
            slices, total = (await session.execute(mine)).one()
            left = await session.scalar(
                select(func.count()).where(SliceBatch.batch_id == batch.id, SliceBatch.status != SliceStatus.DONE)
            )
        assert (batch.slices, batch.slices_left, batch.planned) == (slices, left, total)


async def test_requests_wait_for_others_while_engines_have_work(house: House) -> None:
    patient(house)
    first = await submit(house, 0, 16)
    await house.plan()
    assert (await house.batch(first)).planned == 16  # nothing else was there to run
    second = await submit(house, 100, 16)
    await house.plan()
    house.clock.now += 10
    third = await submit(house, 200, 16)
    await house.plan()
    assert [(await house.batch(each)).planned for each in (second, third)] == [0, 0]
    house.clock.now += WAIT_S - 10
    await house.plan()  # with the third, though that has waited for less
    assert [(await house.batch(each)).planned for each in (second, third)] == [16, 16]
    await books_are_right(house, first, second, third)


async def test_requests_do_not_wait_once_engines_have_taken_all_others(house: House) -> None:
    patient(house)
    await submit(house, 0, 16)
    await house.plan()
    second = await submit(house, 100, 16)
    await house.plan()
    leases = Leases(house.database, "w", "test-model", 30)
    async with house.database.read() as session:
        slices = list(await session.scalars(select(Slice.id)))
    for slice_id in slices[:-1]:
        assert await leases.claim(slice_id)
    await house.plan()
    assert (await house.batch(second)).planned == 0
    assert await leases.claim(slices[-1])
    await house.plan()
    assert (await house.batch(second)).planned == 16


async def test_a_near_deadline_does_not_wait(house: House) -> None:
    patient(house)
    await submit(house, 0, 16)
    await house.plan()
    urgent = await submit(house, 100, 16, int(HOUR_S) - 60)
    await house.plan()
    assert (await house.batch(urgent)).planned == 16


async def test_a_full_window_does_not_wait(house: House) -> None:
    patient(house, window_requests=20)
    await submit(house, 0, 16)
    await house.plan()
    second = await submit(house, 100, 16)
    await house.plan()
    assert (await house.batch(second)).planned == 0
    third = await submit(house, 200, 16)
    await house.plan()
    assert (await house.batch(second)).planned + (await house.batch(third)).planned >= 20


async def test_what_no_engine_has_is_planned_again_with_what_comes(house: House) -> None:
    first = await submit(house, 0, 40)
    await house.plan()
    second = await submit(house, 100, 40)
    await house.plan()
    await books_are_right(house, first, second)
    async with house.database.read() as session:
        [window] = await session.scalars(select(Slice.window_id).distinct())
        assert window == await session.scalar(select(func.max(Window.id)))
    engine = ScriptedEngine()
    async with house.working(engine):
        batches = await house.until_ended(first, second)
    assert [batch.completed for batch in batches] == [40, 40]
    assert set(engine.runs.values()) == {1}


async def test_what_an_engine_has_or_had_stays(house: House) -> None:
    first = await submit(house, 0, 40)
    await house.plan()
    leases = Leases(house.database, "w", "test-model", 30)
    async with house.database.read() as session:
        held, had, *_ = await session.scalars(select(Slice.id).order_by(Slice.id))
    assert await leases.claim(held)
    lease = await leases.claim(had)
    assert lease is not None
    assert await leases.give_back(lease)  # it may have answers
    second = await submit(house, 100, 40)
    await house.plan()
    await books_are_right(house, first, second)
    async with house.database.read() as session:
        assert {held, had} <= set(await session.scalars(select(Slice.id)))


async def test_few_new_requests_do_not_plan_many_again(house: House) -> None:
    first = await submit(house, 0, 80)
    await house.plan()
    second = await submit(house, 100, 19)
    await house.plan()
    await books_are_right(house, first, second)
    async with house.database.read() as session:
        assert len(list(await session.scalars(select(Slice.window_id).distinct()))) == 2


async def test_what_does_not_fit_a_window_is_not_planned_again(house: House) -> None:
    first = await submit(house, 0, 40)
    await house.plan()
    tokens = (await house.batch(first)).prompt_tokens
    patient(house, window_wait_s=0, window_tokens=tokens + 10)
    second = await submit(house, 100, 30)
    await house.plan()
    await books_are_right(house, first, second)
    async with house.database.read() as session:
        assert len(list(await session.scalars(select(Slice.window_id).distinct()))) == 2


async def test_requests_of_a_batch_that_ends_are_left_out(house: House) -> None:
    first, other = await submit(house, 0, 40), await submit(house, 50, 40)
    await house.plan()
    async with house.database.write() as session:
        assert await move_batch(session, first, BatchStatus.CANCELLING, now=house.clock())
    second = await submit(house, 100, 40)
    await house.plan()
    assert {batch for batch, _ in await requests_of(house)} == {other, second}
    async with house.working(ScriptedEngine()):
        cancelled, *batches = await house.until_ended(first, other, second)
    assert (cancelled.status, cancelled.failed) == ("cancelled", 40)
    assert [batch.completed for batch in batches] == [40, 40]


async def test_a_slice_that_is_leased_meanwhile_stays_and_nothing_is_lost(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await submit(house, 0, 40)
    await house.plan()
    found, leases = planner.unleased, Leases(house.database, "w", "test-model", 30)

    async def and_lease(*given: object) -> Unleased:
        before = await found(*given)  # type: ignore[arg-type]
        assert await leases.claim(before.slices[0])
        monkeypatch.setattr(planner, "unleased", found)
        return before

    monkeypatch.setattr(planner, "unleased", and_lease)
    second = await submit(house, 100, 40)
    while await house.validator.run_once():
        pass
    await house.planner.run_once()
    assert (await house.batch(second)).planned == 40  # at once, without what came before
    assert len(await house.storage.folders("plans")) == 2  # the plan that was given up is gone
    await books_are_right(house, first, second)


async def test_an_id_that_a_worker_was_told_of_never_means_another_slice(house: House) -> None:
    told, batches = dict[int, int](), list[str]()
    for number in range(4):
        batches.append(await submit(house, 100 * number, 24 - 4 * number))  # few enough for ids to come again
        await house.plan()
        async with house.database.read() as session:
            now = dict((await session.execute(select(Slice.id, Slice.window_id))).tuples().all())
        assert all(told.get(slice_id, window_id) == window_id for slice_id, window_id in now.items())
        told |= now
    await books_are_right(house, *batches)


async def test_planners_and_workers_side_by_side_answer_every_request_once(house: House) -> None:
    engine, batch_ids = ScriptedEngine(), list[str]()
    async with house.working(engine, in_flight=8):
        for number in range(6):
            batch_ids.append(await submit(house, 1000 * number, 24))
            while await house.validator.run_once():
                pass
            await asyncio.gather(*(house.planner.run_once() for _ in range(3)), house.reconciler.run_once())
        while any([await house.planner.run_once() for _ in range(2)]):
            pass
        batches = await house.until_ended(*batch_ids)
    assert [batch.completed for batch in batches] == [24] * 6
    assert set(engine.runs.values()) == {1}
    for batch in batches:
        await house.results(batch)


async def test_expectations_of_a_batch_count_each_request_once(house: House) -> None:
    first = await submit(house, 0, 40)
    await house.plan()
    before = await house.batch(first)
    await submit(house, 100, 40)
    await house.plan()
    after = await house.batch(first)
    assert after.planned_output_tokens == before.planned_output_tokens


@pytest.mark.parametrize(("workers", "slices"), [(0, [256, 256]), (1, [256, 256]), (2, [32] * 16), (30, [16] * 32)])
async def test_each_of_several_workers_gets_several_slices(house: House, workers: int, slices: list[int]) -> None:
    patient(house, slice_requests=256)
    board = CrewBoard(house.redis, "test-model")
    for number in range(workers):
        await board.look(f"w{number}", Hand(0, 0.0, 16))
    batch_id = await submit(house, 0, 512)
    await house.plan()
    async with house.database.read() as session:
        counts = (await session.scalars(select(Slice.count).order_by(Slice.id))).all()
    assert list(counts) == slices
    await books_are_right(house, batch_id)


async def test_a_window_is_planned_for_one_worker_without_redis(house: House) -> None:
    patient(house, slice_requests=256)
    await submit(house, 0, 512)
    while await house.validator.run_once():
        pass
    nowhere = open_redis("unix:///nowhere.sock")
    assert await Planner(house.database, house.storage, house.settings, house.clock, nowhere).run_once()
    async with house.database.read() as session:
        assert (await session.scalars(select(Slice.count))).all() == [256, 256]
