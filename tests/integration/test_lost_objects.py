"""Object storage that lists late or loses what it acknowledged, and a database that is one commit behind it."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import delete, select, update

from service.db.tables import Batch, BatchStatus, File, Slice
from service.jobs.input_names import names_of
from service.jobs.sweeper import KEEP_S, LIST_S, Sweeper
from service.objects.storage import LATE_S, Storage, file_key
from service.queue.leases import Leases
from tests.batches import create_batch
from tests.integration.harness import (
    Harness,
    ScriptedEngine,
    all_slices_done,
    jsonl,
    line,
    set_status,
)
from tests.waiting import until

LINES = 20


async def submitted(harness: Harness) -> str:
    batch_id = await harness.submit(jsonl(line(n) for n in range(LINES)))
    await harness.plan()
    return batch_id


async def answered(harness: Harness, engine: ScriptedEngine) -> str:
    """Return a batch whose slices are done, before it ends."""
    batch_id = await submitted(harness)
    async with harness.working(engine):
        await until(lambda: all_slices_done(harness))
    await set_status(harness, batch_id, BatchStatus.FINALIZING)
    return batch_id


async def whole(harness: Harness, batch_id: str, engine: ScriptedEngine | None = None) -> Batch:
    """Let a worker do what is left, until the batch has ended, and check that each request has its answer."""
    async with harness.working(engine or ScriptedEngine()):
        [batch] = await harness.until_ended(batch_id)
    output, errors = await harness.results(batch)
    assert (batch.status, len(output), errors) == (BatchStatus.COMPLETED, batch.total, {})
    return batch


async def lose(harness: Harness, prefix: str) -> None:
    keys = await harness.storage.keys(prefix)
    assert keys
    for key in keys:
        await harness.storage.delete(key)


async def rows(harness: Harness, table: Any) -> list[dict[str, Any]]:
    async with harness.database.read() as session:
        return [dict(row) for row in (await session.execute(select(table.__table__))).mappings()]


async def put_back(harness: Harness, table: Any, before: list[dict[str, Any]]) -> None:
    """As if the table's last commits had never been made."""
    async with harness.database.write() as session:
        await session.execute(delete(table).where(table.id.not_in([row["id"] for row in before])))
        for row in before:
            await session.execute(update(table.__table__).where(table.id == row["id"]).values(row))


async def test_a_late_listing_hides_no_answer(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = Storage.modified

    async def late(storage: Storage, prefix: str) -> dict[str, float]:
        return {} if prefix.startswith("shards") else await listed(storage, prefix)

    monkeypatch.setattr(Storage, "modified", late)
    engine = ScriptedEngine()
    batch_id = await answered(harness, engine)
    await whole(harness, batch_id, engine)
    assert set(engine.runs.values()) == {1}


async def test_a_lost_segment_is_waited_for_and_runs_again(harness: Harness) -> None:
    engine = ScriptedEngine()
    batch_id = await answered(harness, engine)
    [key, *_] = await harness.storage.keys("shards")
    lost = await harness.storage.read(key)
    await harness.storage.delete(key)
    await harness.finalizer.run_once()
    assert (await harness.batch(batch_id)).status == BatchStatus.FINALIZING
    harness.clock.now += LATE_S + 1
    await harness.finalizer.run_once()
    before = await harness.batch(batch_id)
    gone = len(lost.splitlines())
    assert (before.status, before.completed, before.finalizing_at) == (BatchStatus.IN_PROGRESS, LINES - gone, None)
    assert (await harness.progress.counts(harness.database, batch_id)).completed == LINES - gone
    await whole(harness, batch_id, engine)
    assert sorted(engine.runs.values()) == [1] * (LINES - gone) + [2] * gone


async def test_a_segment_that_comes_late_is_read(harness: Harness) -> None:
    engine = ScriptedEngine()
    batch_id = await answered(harness, engine)
    [key, *_] = await harness.storage.keys("shards")
    late = await harness.storage.read(key)
    await harness.storage.delete(key)
    await harness.finalizer.run_once()
    await harness.storage.put(key, late)
    harness.clock.now += LATE_S / 2
    await whole(harness, batch_id, engine)
    assert set(engine.runs.values()) == {1}


async def test_what_was_answered_before_a_cancel_keeps_its_answer(harness: Harness) -> None:
    batch_id = await answered(harness, ScriptedEngine())
    await set_status(harness, batch_id, BatchStatus.CANCELLING)
    [key, *_] = await harness.storage.keys("shards")
    await harness.storage.delete(key)
    await harness.finalizer.run_once()
    assert (await harness.batch(batch_id)).status == BatchStatus.CANCELLING
    harness.clock.now += LATE_S + 1
    [batch] = await harness.until_ended(batch_id)
    output, errors = await harness.results(batch)
    assert len(output) + len(errors) == LINES
    assert {each["error"]["code"] for each in errors.values()} == {"batch_cancelled"}


async def test_a_lost_plan_loses_nothing(harness: Harness) -> None:
    batch_id = await submitted(harness)
    await lose(harness, "plans")
    harness.clock.now += LATE_S + 1
    other = await harness.submit(jsonl(line(n) for n in range(3)))  # is planned beside it
    await harness.plan()
    await whole(harness, batch_id)
    await whole(harness, other)


@pytest.mark.parametrize("planned", [False, True])
async def test_a_lost_index_is_written_again(harness: Harness, planned: bool) -> None:
    batch_id = await harness.submit(jsonl(line(n) for n in range(LINES)))
    await harness.validator.run_once()
    if planned:
        await harness.plan()
    index_id = (await harness.batch(batch_id)).index_id
    await lose(harness, f"indexes/{index_id}")
    harness.clock.now += LATE_S + 1
    async with harness.working(ScriptedEngine()):
        if planned:  # beside another batch, slices that nobody has begun are planned again, by the index
            await harness.until_ended(batch_id)
        other = await harness.submit(jsonl(line(n) for n in range(3)))

        async def have_ended() -> bool:
            await harness.plan()
            await harness.finalizer.run_once()
            found = [await harness.batch(each) for each in (batch_id, other)]
            harness.clock.now += 1.0  # what failed rests
            return all(each.status == BatchStatus.COMPLETED for each in found)

        await until(have_ended)
    for each in (batch_id, other):
        batch = await harness.batch(each)
        assert (batch.completed, batch.failed) == (batch.total, 0)
    is_new = (await harness.batch(batch_id)).index_id not in (None, index_id)
    assert is_new != planned  # workers need no index: the plan says where the lines are


async def test_a_batch_without_its_index_holds_up_no_neighbour(harness: Harness) -> None:
    """In a slice of both: the neighbour ends at once, and what was left out runs once there is an index again."""
    one, other = [await harness.submit(jsonl(line(n) for n in range(LINES))) for _ in range(2)]
    await harness.plan()
    async with harness.database.write() as session:
        await session.execute(update(Batch).where(Batch.id == one).values(index_id=None))
    async with harness.working(ScriptedEngine()):
        [ended] = await harness.until_ended(other)
        assert ended.completed == LINES
        assert (await harness.batch(one)).status == BatchStatus.IN_PROGRESS
        await harness.validator.run_once()
        [late] = await harness.until_ended(one)
    output, errors = await harness.results(late)
    assert (len(output), errors) == (LINES, {})


async def test_a_lost_input_file_ends_with_a_line_for_each_request(harness: Harness) -> None:
    batch_id = await submitted(harness)
    await lose(harness, "files")
    harness.clock.now += LATE_S + 1
    async with harness.working(ScriptedEngine()):
        [batch] = await harness.until_ended(batch_id)
    assert (batch.status, batch.completed, batch.failed) == (BatchStatus.COMPLETED, 0, LINES)


async def test_a_finalizers_lost_commit_ends_the_batch_again(harness: Harness) -> None:
    batch_id = await answered(harness, ScriptedEngine())
    before = {table: await rows(harness, table) for table in (Batch, File)}
    await whole(harness, batch_id)
    await harness.sweeper.run_once()
    for table, found in before.items():
        await put_back(harness, table, found)
    await whole(harness, batch_id)


@pytest.mark.parametrize("status", [BatchStatus.CANCELLING, BatchStatus.FINALIZING])
async def test_a_batch_without_its_index_ends_with_the_names_of_its_input(
    harness: Harness, status: BatchStatus
) -> None:
    batch_id = await submitted(harness)
    await lose(harness, "indexes")
    await set_status(harness, batch_id, status)
    harness.clock.now += 86400 + 1
    [batch] = await harness.until_ended(batch_id)
    _, errors = await harness.results(batch)
    assert set(errors) == {f"id-{n}" for n in range(LINES)}


async def test_a_lost_claim_leaves_one_owner(harness: Harness) -> None:
    await submitted(harness)
    leases = [Leases(harness.database, name, "test-model", 30) for name in ("a", "b")]
    before = await rows(harness, Slice)
    old = await leases[0].claim(1)
    assert old
    await put_back(harness, Slice, before)
    new = await leases[1].claim(1)
    assert new
    assert await leases[0].renew([old]) == set()
    assert not await leases[0].finish(old, {}, [])
    assert await leases[1].renew([new]) == {new}


async def test_slices_of_an_older_service_are_found(harness: Harness) -> None:
    batch_id = await answered(harness, ScriptedEngine())
    async with harness.database.write() as session:
        await session.execute(update(Slice).values(segments=None, epoch=3))
    await whole(harness, batch_id)


async def test_a_lease_that_loads_nothing_adds_nothing_to_ask_for(harness: Harness) -> None:
    await submitted(harness)
    leases = Leases(harness.database, "a", "test-model", 30)
    for _ in range(3):
        lease = await leases.claim(1)
        assert lease
        await leases.give_back(lease, [*lease.before, (lease.epoch, 0)])
    lease = await leases.claim(1)
    assert lease
    assert (lease.epoch, lease.before) == (4, ())


async def test_nothing_is_swept_that_the_newest_backup_needs(harness: Harness, tmp_path: Path) -> None:
    batch_id = await answered(harness, ScriptedEngine())
    await whole(harness, batch_id)
    shards = await harness.storage.keys("shards")
    backup = tmp_path / "backup"
    sweeper = Sweeper(harness.database, harness.storage, harness.clock, backup)
    harness.clock.now += KEEP_S + 1
    await sweeper.run_once()  # it has never run
    assert await harness.storage.keys("shards") == shards
    backup.touch()
    os.utime(backup, (0, harness.clock.now - KEEP_S - 60))
    await sweeper.run_once()
    assert await harness.storage.keys("shards") == shards
    harness.clock.now += LIST_S
    os.utime(backup, (0, harness.clock.now))
    await sweeper.run_once()
    assert await harness.storage.keys("shards") == []


async def test_names_of_a_retry_are_those_of_its_requests(harness: Harness) -> None:
    data = b"\xef\xbb\xbf" + jsonl(line(n) for n in range(6)).replace(b"\n", b"\n\n")
    batch_id = await create_batch(harness.database, harness.storage, data, harness.clock())
    errors = jsonl([{"custom_id": "id-1"}, {"custom_id": None}, {"custom_id": "id-4"}])
    await harness.storage.put(file_key("file-errors"), errors)
    async with harness.database.write() as session:
        await session.execute(update(Batch).where(Batch.id == batch_id).values(error_file_id="file-errors"))
    batch = await harness.batch(batch_id)
    numbers = np.array([0, 1])
    assert [each async for each in names_of(harness.database, harness.storage, batch, numbers)] == [
        (0, "id-0"),
        (1, "id-1"),
    ]
    batch.retry_of = batch_id
    assert [each async for each in names_of(harness.database, harness.storage, batch, numbers)] == [
        (0, "id-1"),
        (1, "id-4"),
    ]
