"""Deaths, races and damage on the way from a file to its answers: nothing is lost, doubled or run again."""

import asyncio
import random
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from engine_ext.plugin.worker.answers import Answer as EngineAnswer
from service.db.tables import BatchStatus, Model, Slice, SliceStatus, WebhookDelivery
from service.db.tenant_tables import AuditEvent
from service.jobs.sweeper import KEEP_AUDIT_S, KEEP_DELIVERIES_S, KEEP_S
from service.objects.shards import Answer, Shard, Usage
from service.objects.storage import CLOCK_KEY, file_key
from service.queue.leases import Leases
from tests.integration.harness import (
    Harness,
    ScriptedEngine,
    all_slices_done,
    completed_are,
    jsonl,
    line,
    set_status,
)
from tests.waiting import kill, until

pytestmark = pytest.mark.dialects


async def test_dead_worker_is_followed_and_nothing_answered_runs_again(harness: Harness) -> None:
    batch_id = await harness.submit(jsonl(line(n) for n in range(30)))
    await harness.plan()
    first = ScriptedEngine(hold=asyncio.Event(), hold_after=13)
    async with harness.working(first, "worker-a") as task:
        await until(lambda: completed_are(harness, batch_id, 13))
        await until(lambda: nothing_is_ready(harness))
        await kill(task)  # no drain, no lease given back
    second = ScriptedEngine()
    async with harness.working(second, "worker-b"):
        await harness.reconciler.run_once()
        await asyncio.sleep(0.1)
        assert not second.runs  # the dead worker's leases still hold
        await harness.expire_leases()
        [batch] = await harness.until_ended(batch_id)
    output, errors = await harness.results(batch)
    assert (len(output), errors) == (30, {})
    assert sum(second.runs.values()) == 30 - 13
    assert max(second.runs.values()) == 1


async def nothing_is_ready(harness: Harness) -> bool:
    async with harness.database.read() as session:
        return not (await session.scalars(select(Slice).where(Slice.status == SliceStatus.READY))).all()


async def test_clean_stop_gives_slices_back_at_once(harness: Harness) -> None:
    batch_id = await harness.submit(jsonl(line(n) for n in range(30)))
    await harness.plan()
    first = ScriptedEngine(hold=asyncio.Event(), hold_after=13)
    async with harness.working(first, "worker-a"):
        await until(lambda: completed_are(harness, batch_id, 13))
    async with harness.database.read() as session:
        leased = (await session.scalars(select(Slice).where(Slice.status == SliceStatus.LEASED))).all()
    assert not leased
    second = ScriptedEngine()
    async with harness.working(second, "worker-b"):
        [batch] = await harness.until_ended(batch_id)
    assert len((await harness.results(batch))[0]) == 30
    assert sum(second.runs.values()) == 30 - 13


async def test_a_worker_can_be_stopped_at_any_moment(harness: Harness) -> None:
    """Stops in the middle of claims once left a transaction open, or were lost on the way."""
    await harness.submit(jsonl(line(n) for n in range(400)))
    await harness.plan()
    moments = random.Random(1)
    for _ in range(30):
        async with asyncio.timeout(20), harness.working(ScriptedEngine(hold=asyncio.Event())):
            await asyncio.sleep(moments.uniform(0.0, 0.1))
        await harness.reconciler.run_once()
    async with harness.database.write() as session:
        assert set(await session.scalars(select(Slice.status))) == {SliceStatus.READY}


async def test_redis_wiped_in_the_middle_loses_nothing(harness: Harness) -> None:
    batch_id = await harness.submit(jsonl(line(n) for n in range(60)))
    await harness.plan()
    hold = asyncio.Event()
    engine = ScriptedEngine(hold=hold, hold_after=5)
    async with harness.working(engine, in_flight=16):
        await until(lambda: completed_are(harness, batch_id, 5))
        await harness.redis.flushall()
        hold.set()
        [batch] = await harness.until_ended(batch_id)
    assert len((await harness.results(batch))[0]) == 60
    assert set(engine.runs.values()) == {1}


async def test_stale_worker_cannot_finish_or_renew_a_slice(harness: Harness) -> None:
    await harness.submit(jsonl(line(n) for n in range(4)))
    await harness.plan()
    slow = Leases(harness.database, "slow", "test-model", 30)
    quick = Leases(harness.database, "quick", "test-model", 30)
    stale = await slow.claim(1)
    assert stale
    assert await quick.claim(1) is None
    assert await harness.expire_leases() == 1
    fresh = await quick.claim(1)
    assert fresh
    assert fresh.epoch == stale.epoch + 1
    assert await slow.renew([stale]) == set()
    assert not await slow.finish(stale, {}, [])
    assert not await slow.give_back(stale, [])
    assert await quick.renew([fresh, stale]) == {fresh}
    assert await quick.finish(fresh, {}, [])
    assert not await quick.finish(fresh, {}, [])
    assert await slow.claim(1) is None


async def test_answers_of_two_epochs_count_once(harness: Harness) -> None:
    batch_id = await harness.submit(jsonl(line(n) for n in range(3)))
    await harness.plan()
    async with harness.working(ScriptedEngine()):
        await until(lambda: all_slices_done(harness))
    shard = Shard(harness.storage, 1)
    found = [each async for each in shard.answers(await shard.names([(1, None)]))]
    await shard.write(2, 0, [replace_usage(each) for each in found])
    async with harness.database.write() as session:  # as if another worker had run it after the first one
        await session.execute(update(Slice).where(Slice.id == 1).values(epoch=2, segments=[[1, 1], [2, 1]]))
    [batch] = await harness.until_ended(batch_id)
    output, _ = await harness.results(batch)
    assert len(output) == 3


async def test_two_finalizers_end_a_batch_once(harness: Harness) -> None:
    batch_id = await harness.submit(jsonl(line(n) for n in range(9)))
    await harness.plan()
    async with harness.working(ScriptedEngine()):
        await until(lambda: all_slices_done(harness))
    await set_status(harness, batch_id, BatchStatus.FINALIZING)
    before = await harness.batch(batch_id)
    await asyncio.gather(*(harness.finalizer.finalize(before) for _ in range(4)))
    batch = await harness.batch(batch_id)
    await harness.results(batch)
    assert await harness.storage.keys("files") == sorted(
        [f"files/{batch.input_file_id}", f"files/{batch.output_file_id}"]
    )


async def test_two_planners_plan_a_batch_once(harness: Harness) -> None:
    batch_id = await harness.submit(jsonl(line(n) for n in range(30)))
    await harness.validator.run_once()
    await asyncio.gather(*(harness.planner.run_once() for _ in range(4)))
    async with harness.database.read() as session:
        assert (await session.scalar(select(func.sum(Slice.count)))) == 30
    assert len([key for key in await harness.storage.keys("plans") if key.endswith("/order")]) == 1
    async with harness.working(ScriptedEngine()):
        [batch] = await harness.until_ended(batch_id)
    assert len((await harness.results(batch))[0]) == 30


async def test_slice_that_cannot_be_written_is_kept_until_it_can(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = await harness.submit(jsonl(line(n) for n in range(9)))
    await harness.plan()
    written, failures = Shard.write, 3

    async def failing(self: Shard, epoch: int, number: int, answers: list[Answer]) -> None:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise OSError("No space left on device")
        await written(self, epoch, number, answers)

    monkeypatch.setattr(Shard, "write", failing)
    engine = ScriptedEngine()
    async with harness.working(engine):
        [batch] = await harness.until_ended(batch_id)
    assert len((await harness.results(batch))[0]) == 9
    assert set(engine.runs.values()) == {1}


async def test_ready_slices_of_an_ended_batch_run_no_more(harness: Harness) -> None:
    cancelled = await harness.submit(jsonl(line(n) for n in range(40)))
    await harness.plan()
    await set_status(harness, cancelled, BatchStatus.CANCELLING)
    [batch] = await harness.until_ended(cancelled)
    assert (batch.status, batch.failed) == (BatchStatus.CANCELLED, 0)
    await harness.sweeper.run_once()
    engine = ScriptedEngine()
    after = await harness.submit(jsonl(line(n) for n in range(3)))
    async with harness.working(engine, in_flight=8):
        await harness.plan()
        await harness.until_ended(after)
    assert sum(engine.runs.values()) == 3
    async with harness.database.read() as session:
        slices = (await session.scalars(select(Slice))).all()
    assert {each.status for each in slices} == {SliceStatus.DONE}
    assert max(each.epoch for each in slices) == 1


async def test_slice_claimed_for_ended_batches_is_done_at_once(harness: Harness) -> None:
    """The batch ends between the claim and the look at its rows; its plan may be swept already."""
    batch_id = await harness.submit(jsonl(line(n) for n in range(3)))
    await harness.plan()
    await set_status(harness, batch_id, BatchStatus.CANCELLED)
    await harness.sweeper.run_once()
    engine = ScriptedEngine()
    async with harness.working(engine):
        await until(lambda: all_slices_done(harness))
    assert not engine.runs


async def test_two_validators_leave_a_batch_whole(harness: Harness) -> None:
    batch_id = await harness.submit(jsonl(line(n) for n in range(30)))
    before = await harness.batch(batch_id)
    await asyncio.gather(*(harness.validator.validate(before) for _ in range(4)))
    await harness.planner.run_once()
    assert len(await harness.storage.folders("indexes")) == 1
    async with harness.working(ScriptedEngine()):
        [batch] = await harness.until_ended(batch_id)
    assert len((await harness.results(batch))[0]) == 30


async def test_request_that_raises_is_an_error_line_of_its_own(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = await harness.submit(jsonl(line(n) for n in range(9)))
    await harness.plan()
    engine = ScriptedEngine()
    run = engine.run

    async def raising(endpoint: str, body: dict[str, Any], *about: Any) -> EngineAnswer:
        if body["messages"][-1]["content"] == "request 4":
            raise RecursionError("too deep")
        return await run(endpoint, body, *about)

    monkeypatch.setattr(engine, "run", raising)
    async with harness.working(engine):
        [batch] = await harness.until_ended(batch_id)
    output, errors = await harness.results(batch)
    assert len(output) == 8
    message = "The engine failed to answer this request in 3 attempts: RecursionError: too deep"
    assert errors["id-4"]["error"]["message"] == message


async def test_batch_that_cannot_be_validated_does_not_stop_another(harness: Harness) -> None:
    async with harness.database.write() as session:
        session.add(Model(name="broken", source="/nonexistent/model", created_at=0))
    stuck = await harness.submit(jsonl([line(1, body={"model": "broken", "messages": ["x"]})]))
    good = await harness.submit(jsonl(line(n) for n in range(3)))
    validator = harness.validator
    while await validator.run_once():
        pass
    assert (await harness.batch(stuck)).status == BatchStatus.VALIDATING
    assert (await harness.batch(good)).status == BatchStatus.IN_PROGRESS
    assert not await validator.run_once()  # it rests
    harness.clock.now += 61
    assert await validator.run_once()


async def test_commit_of_unknown_outcome_deletes_nothing(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database commits, and its answer is lost: the files that the row now names must stay."""
    batch_id = await harness.submit(jsonl(line(n) for n in range(3)))
    await harness.plan()
    async with harness.working(ScriptedEngine()):
        await until(lambda: all_slices_done(harness))
    await set_status(harness, batch_id, BatchStatus.FINALIZING)
    before, finalizer = await harness.batch(batch_id), harness.finalizer
    write = harness.database.write

    @asynccontextmanager
    async def losing() -> AsyncGenerator[AsyncSession, None]:
        async with write() as session:
            yield session
        raise ConnectionResetError

    with monkeypatch.context() as patch:
        patch.setattr(harness.database, "write", losing)
        with pytest.raises(ConnectionResetError):
            await finalizer.finalize(before)
    batch = await harness.batch(batch_id)
    assert batch.status == BatchStatus.COMPLETED
    assert len((await harness.results(batch))[0]) == 3


async def test_damaged_segment_costs_only_its_own_answers(harness: Harness) -> None:
    batch_id = await harness.submit(jsonl(line(n) for n in range(8)))
    await harness.plan()
    await harness.storage.put("shards/1/00000001-00000000", b'["batch_x",1,tr')
    async with harness.database.write() as session:  # a power cut ended the first lease
        await session.execute(update(Slice).where(Slice.id == 1).values(epoch=1))
    engine = ScriptedEngine()
    async with harness.working(engine):
        [batch] = await harness.until_ended(batch_id)
    assert len((await harness.results(batch))[0]) == 8


async def test_sweeper_deletes_what_a_crash_left_and_nothing_young(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = await harness.submit(jsonl(line(n) for n in range(3)))
    await harness.plan()
    for key in ("plans/plan_x/order", "indexes/index_x/records", "files/file-x"):
        await harness.storage.put(key, b"left by a crash")
    staged = harness.settings.data_dir / "objects" / "files" / "file-y#1"  # of an upload whose process died
    staged.write_bytes(b"half of it")
    needed = await harness.storage.keys("")
    # A host's clock that is wrong makes nothing old: the store dates its objects.
    harness.clock.now = time.time() + 2 * KEEP_S
    assert not await harness.sweeper.run_once()
    assert set(await harness.storage.keys("")) == {*needed, CLOCK_KEY}
    assert staged.exists()
    store_now = harness.storage.now

    async def later() -> float:
        return await store_now() + KEEP_S + 1

    monkeypatch.setattr(harness.storage, "now", later)
    assert await harness.sweeper.run_once()
    left = set(await harness.storage.keys("")) - {CLOCK_KEY}
    assert not [key for key in left if "_x" in key or "-x" in key]
    assert len(left) == len(needed) - 3
    assert not staged.exists()
    async with harness.working(ScriptedEngine()):
        [batch] = await harness.until_ended(batch_id)
    assert len((await harness.results(batch))[0]) == 3


def replace_usage(answer: Answer) -> Answer:
    return Answer(answer.batch_id, answer.request, answer.ok, Usage(99, 99, 99, 99), answer.line)


async def test_sweeper_forgets_what_is_long_ago(harness: Harness) -> None:
    now = int(harness.clock())

    def delivery(number: int, age_s: int, next_at: float | None) -> WebhookDelivery:
        return WebhookDelivery(
            id=f"evt_{number}", endpoint_id="e", type="t", batch_id="b", next_at=next_at, created_at=now - age_s
        )

    async with harness.database.write() as session:
        session.add_all([delivery(1, KEEP_DELIVERIES_S + 1, None), delivery(2, KEEP_DELIVERIES_S - 1, None)])
        session.add(delivery(3, KEEP_DELIVERIES_S + 1, now + 5.0))
        for age_s in (KEEP_AUDIT_S + 1, KEEP_AUDIT_S - 1):
            session.add(AuditEvent(at=now - age_s, project_id="p", actor="a", action="x", object_id="o"))
    await harness.sweeper.run_once()
    async with harness.database.read() as session:
        assert set(await session.scalars(select(WebhookDelivery.id))) == {"evt_2", "evt_3"}
        assert list(await session.scalars(select(AuditEvent.at))) == [now - KEEP_AUDIT_S + 1]


async def test_a_batch_ends_though_its_input_was_removed_from_the_store(harness: Harness) -> None:
    batch_id = await harness.submit(jsonl(line(n) for n in range(6)), window_s=60)
    await harness.plan()
    await harness.storage.delete(file_key((await harness.batch(batch_id)).input_file_id))
    harness.clock.now += 61
    await harness.expiry.run_once()
    [batch] = await harness.until_ended(batch_id)
    lines = (await harness.storage.read(file_key(batch.error_file_id or ""))).splitlines()
    assert (batch.status, batch.failed, len(lines)) == (BatchStatus.EXPIRED, 0, 6)
