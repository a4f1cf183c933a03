"""From a file to its answers: exactly one line for every request, whatever happens on the way."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from service.db.tables import Batch, BatchStatus, Model, Slice, SliceStatus, Window
from service.queue.leases import Counts, Leases
from service.request_index import RequestIndex
from service.shards import Answer, Shard, Usage
from tests.integration.house import House, ScriptedAnswer, ScriptedEngine, jsonl, line


async def answered(house: House, batch_id: str) -> Counts:
    return await house.progress.counts(house.database, batch_id)


async def test_every_request_gets_its_own_answer(house: House) -> None:
    data = b"\xef\xbb\xbf" + jsonl(line(n) for n in range(20)) + b"\n  \r\n" + jsonl(line(n) for n in range(20, 41))
    batch_id = await house.submit(data.removesuffix(b"\n"))
    await house.plan()
    async with house.working(ScriptedEngine()):
        [batch] = await house.until_ended(batch_id)
    output, errors = await house.results(batch)
    assert batch.status == BatchStatus.COMPLETED
    assert not errors
    assert {key: each["response"]["body"]["choices"][0]["message"]["content"] for key, each in output.items()} == {
        f"id-{n}": f"request {n}" for n in range(41)
    }
    assert all(each["error"] is None and each["id"].startswith("batch_req_") for each in output.values())


async def test_ranks_follow_the_plan_and_batches_share_a_window(house: House) -> None:
    first = await house.submit(jsonl(line(n) for n in range(10)))
    second = await house.submit(jsonl(line(n) for n in range(10, 20)))
    await house.plan()
    engine = ScriptedEngine()
    async with house.working(engine):
        batches = await house.until_ended(first, second)
    assert [batch.completed for batch in batches] == [10, 10]
    assert engine.order == sorted(engine.order)
    async with house.database.read() as session:
        assert (await session.scalar(select(func.count()).select_from(Window))) == 1


async def test_later_window_ranks_behind_an_earlier_one(house: House) -> None:
    engine = ScriptedEngine()
    for _ in range(2):
        await house.submit(jsonl(line(n) for n in range(10)))
        await house.plan()
    async with house.working(engine):
        await house.until(lambda: _done(house))
    assert engine.order == sorted(engine.order)
    assert len(set(engine.order)) == 20


async def _done(house: House) -> bool:
    async with house.database.read() as session:
        return not (await session.scalars(select(Slice).where(Slice.status != SliceStatus.DONE))).all()


async def test_window_is_bounded_and_a_batch_may_span_several(house: House) -> None:
    house.settings = house.settings.model_copy(update={"window_requests": 15})
    batch_id = await house.submit(jsonl(line(n) for n in range(40)))
    await house.validator.run_once()
    for _ in range(3):
        await house.planner.run_once()
    async with house.database.read() as session:
        counts = await session.scalars(
            select(func.sum(Slice.count)).group_by(Slice.window_id).order_by(Slice.window_id)
        )
        assert [int(each) for each in counts] == [15, 15, 10]
    async with house.working(ScriptedEngine()):
        [batch] = await house.until_ended(batch_id)
    assert len((await house.results(batch))[0]) == 40


async def test_refused_request_is_one_error_line(house: House) -> None:
    batch_id = await house.submit(jsonl(line(n) for n in range(10)))
    await house.plan()
    async with house.working(ScriptedEngine(statuses={"request 3": [400]})):
        [batch] = await house.until_ended(batch_id)
    output, errors = await house.results(batch)
    assert batch.status == BatchStatus.COMPLETED
    assert len(output) == 9
    assert errors["id-3"]["response"]["status_code"] == 400
    assert errors["id-3"]["response"]["body"]["error"]["message"] == "no"
    assert errors["id-3"]["error"] is None


async def test_engine_fault_is_tried_again_and_then_said(house: House) -> None:
    batch_id = await house.submit(jsonl(line(n) for n in range(10)))
    await house.plan()
    engine = ScriptedEngine(statuses={"request 3": [500, 503], "request 4": [500, 500, 500]})
    async with house.working(engine):
        [batch] = await house.until_ended(batch_id)
    output, errors = await house.results(batch)
    assert (engine.runs["request 3"], engine.runs["request 4"]) == (3, 3)
    assert "id-3" in output
    assert errors["id-4"]["response"] is None
    assert errors["id-4"]["error"] == {
        "code": "server_error",
        "message": "The engine failed on it in 3 attempts: no",
    }


async def test_batch_of_failures_alone_completes_without_an_output_file(house: House) -> None:
    batch_id = await house.submit(jsonl([line(1)]))
    await house.plan()
    async with house.working(ScriptedEngine(statuses={"request 1": [400]})):
        [batch] = await house.until_ended(batch_id)
    assert (batch.status, batch.output_file_id, batch.failed) == (BatchStatus.COMPLETED, None, 1)


async def test_dead_worker_is_followed_and_nothing_answered_runs_again(house: House) -> None:
    batch_id = await house.submit(jsonl(line(n) for n in range(30)))
    await house.plan()
    first = ScriptedEngine(hold=asyncio.Event(), hold_after=13)
    async with house.working(first, "worker-a") as task:
        await house.until(lambda: _counted(house, batch_id, 13))
        task.cancel()  # a death: no drain, no lease given back
        await asyncio.gather(task, return_exceptions=True)
    second = ScriptedEngine()
    async with house.working(second, "worker-b"):
        await house.reconciler.run_once()
        await asyncio.sleep(0.1)
        assert not second.runs  # the dead worker's leases still hold
        house.clock.now += house.settings.lease_s + 1
        [batch] = await house.until_ended(batch_id)
    output, errors = await house.results(batch)
    assert (len(output), errors) == (30, {})
    assert sum(second.runs.values()) == 30 - 13
    assert max(second.runs.values()) == 1


async def _counted(house: House, batch_id: str, wanted: int) -> bool:
    return (await answered(house, batch_id)).completed == wanted


async def test_clean_stop_gives_slices_back_at_once(house: House) -> None:
    batch_id = await house.submit(jsonl(line(n) for n in range(30)))
    await house.plan()
    first = ScriptedEngine(hold=asyncio.Event(), hold_after=13)
    async with house.working(first, "worker-a"):
        await house.until(lambda: _counted(house, batch_id, 13))
    async with house.database.read() as session:
        leased = (await session.scalars(select(Slice).where(Slice.status == SliceStatus.LEASED))).all()
    assert not leased
    second = ScriptedEngine()
    async with house.working(second, "worker-b"):
        [batch] = await house.until_ended(batch_id)
    assert len((await house.results(batch))[0]) == 30
    assert sum(second.runs.values()) == 30 - 13


async def test_redis_wiped_in_the_middle_loses_nothing(house: House) -> None:
    batch_id = await house.submit(jsonl(line(n) for n in range(60)))
    await house.plan()
    hold = asyncio.Event()
    engine = ScriptedEngine(hold=hold, hold_after=5)
    async with house.working(engine, in_flight=16):
        await house.until(lambda: _counted(house, batch_id, 5))
        await house.redis.flushall()
        hold.set()
        [batch] = await house.until_ended(batch_id)
    assert len((await house.results(batch))[0]) == 60
    assert set(engine.runs.values()) == {1}


async def test_stale_worker_cannot_finish_or_renew_a_slice(house: House) -> None:
    await house.submit(jsonl(line(n) for n in range(4)))
    await house.plan()
    slow = Leases(house.database, "slow", 30, house.clock)
    quick = Leases(house.database, "quick", 30, house.clock)
    stale = await slow.claim(1)
    assert stale
    assert await quick.claim(1) is None
    house.clock.now += 31
    fresh = await quick.claim(1)
    assert fresh
    assert fresh.epoch == stale.epoch + 1
    assert await slow.renew([stale]) == set()
    assert not await slow.finish(stale, {})
    assert not await slow.give_back(stale)
    assert await quick.renew([fresh, stale]) == {fresh}
    assert await quick.finish(fresh, {})
    assert not await quick.finish(fresh, {})
    assert await slow.claim(1) is None


async def test_answers_of_two_epochs_count_once(house: House) -> None:
    batch_id = await house.submit(jsonl(line(n) for n in range(3)))
    await house.plan()
    async with house.working(ScriptedEngine()):
        await house.until(lambda: _done(house))
    shard = Shard(house.storage, 1)
    found = [each async for each in shard.answers()]
    await shard.write(9, 0, [replace_usage(each) for each in found])
    [batch] = await house.until_ended(batch_id)
    output, _ = await house.results(batch)
    assert len(output) == 3


def replace_usage(answer: Answer) -> Answer:
    return Answer(answer.batch_id, answer.request, answer.ok, Usage(99, 99, 99, 99), answer.line)


async def test_cancel_keeps_finished_answers_and_codes_the_rest(house: House) -> None:
    batch_id = await house.submit(jsonl(line(n) for n in range(20)))
    await house.plan()
    async with house.working(ScriptedEngine(hold=asyncio.Event(), hold_after=7)):
        await house.until(lambda: _counted(house, batch_id, 7))
        await _set_status(house, batch_id, BatchStatus.CANCELLING)
        [batch] = await house.until_ended(batch_id)
        await house.until(lambda: _done(house))  # the worker lets go of what nobody wants
    output, errors = await house.results(batch)
    assert (batch.status, len(output), len(errors)) == (BatchStatus.CANCELLED, 7, 13)
    assert {each["error"]["code"] for each in errors.values()} == {"batch_cancelled"}
    assert set(output) | set(errors) == {f"id-{n}" for n in range(20)}


async def test_cancel_of_one_batch_leaves_its_neighbour_in_the_slice_alone(house: House) -> None:
    first = await house.submit(jsonl(line(n) for n in range(4)))
    second = await house.submit(jsonl(line(n) for n in range(4, 8)))
    await house.plan()
    hold = asyncio.Event()
    async with house.working(ScriptedEngine(hold=hold)):
        await asyncio.sleep(0.05)
        await _set_status(house, first, BatchStatus.CANCELLING)
        await house.until_ended(first)
        hold.set()
        [batch] = await house.until_ended(second)
    assert (batch.status, len((await house.results(batch))[0])) == (BatchStatus.COMPLETED, 4)


async def _set_status(house: House, batch_id: str, status: BatchStatus) -> None:
    async with house.database.write() as session:
        await session.execute(update(Batch).where(Batch.id == batch_id).values(status=status))


async def test_expired_batch_keeps_finished_answers(house: House) -> None:
    batch_id = await house.submit(jsonl(line(n) for n in range(20)), window_s=600)
    await house.plan()
    async with house.working(ScriptedEngine(hold=asyncio.Event(), hold_after=7)):
        await house.until(lambda: _counted(house, batch_id, 7))
        assert await house.expiry.run_once() == 0
        house.clock.now += 601
        assert await house.expiry.run_once() == 1
        [batch] = await house.until_ended(batch_id)
    output, errors = await house.results(batch)
    assert (batch.status, len(output), len(errors)) == (BatchStatus.EXPIRED, 7, 13)
    assert batch.finalizing_at is not None
    assert batch.expired_at is not None
    assert {each["error"]["message"] for each in errors.values()} == {
        "This request could not be executed before the completion window expired."
    }


async def test_two_finalizers_end_a_batch_once(house: House) -> None:
    batch_id = await house.submit(jsonl(line(n) for n in range(9)))
    await house.plan()
    async with house.working(ScriptedEngine()):
        await house.until(lambda: _done(house))
    await _set_status(house, batch_id, BatchStatus.FINALIZING)
    before = await house.batch(batch_id)
    await asyncio.gather(*(house.finalizer.finalize(before) for _ in range(4)))
    batch = await house.batch(batch_id)
    await house.results(batch)
    assert await house.storage.keys("files") == sorted(
        [f"files/{batch.input_file_id}", f"files/{batch.output_file_id}"]
    )


async def test_two_planners_plan_a_batch_once(house: House) -> None:
    batch_id = await house.submit(jsonl(line(n) for n in range(30)))
    await house.validator.run_once()
    await asyncio.gather(*(house.planner.run_once() for _ in range(4)))
    async with house.database.read() as session:
        assert (await session.scalar(select(func.sum(Slice.count)))) == 30
    assert len([key for key in await house.storage.keys("plans") if key.endswith("/order")]) == 1
    async with house.working(ScriptedEngine()):
        [batch] = await house.until_ended(batch_id)
    assert len((await house.results(batch))[0]) == 30


async def test_ended_batch_leaves_only_its_files_in_storage(house: House) -> None:
    batch_id = await house.submit(jsonl(line(n) for n in range(9)))
    await house.plan()
    async with house.working(ScriptedEngine(statuses={"request 1": [400]})):
        [batch] = await house.until_ended(batch_id)
    files = [batch.input_file_id, batch.output_file_id, batch.error_file_id]
    await house.sweeper.run_once()
    assert await house.storage.keys("") == sorted(f"files/{each}" for each in files)
    assert await house.redis.keys("batchweave:progress:*") == []


async def test_slice_that_cannot_be_written_is_kept_until_it_can(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    batch_id = await house.submit(jsonl(line(n) for n in range(9)))
    await house.plan()
    written, failures = Shard.write, 3

    async def failing(self: Shard, epoch: int, number: int, answers: list[Answer]) -> None:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise OSError("No space left on device")
        await written(self, epoch, number, answers)

    monkeypatch.setattr(Shard, "write", failing)
    engine = ScriptedEngine()
    async with house.working(engine):
        [batch] = await house.until_ended(batch_id)
    assert len((await house.results(batch))[0]) == 9
    assert set(engine.runs.values()) == {1}


@pytest.mark.parametrize(
    ("data", "code", "number"),
    [
        (b"", "empty_file", None),
        (b"\n\n", "empty_file", None),
        (jsonl([line(1)]) + b"{oops\n", "invalid_json_line", 2),
        (jsonl([line(1), line(2), line(1)]), "duplicate_custom_id", 3),
        (jsonl([line(1), line(2, url="/v1/completions")]), "url_mismatch", 2),
        (jsonl([line(1, body={"model": "gpt-9", "messages": ["x"]})]), "model_not_found", 1),
        (b"x" * 2_000_000, "invalid_request", 1),
    ],
)
async def test_bad_file_fails_with_its_code_and_line(house: House, data: bytes, code: str, number: int | None) -> None:
    house.settings = house.settings.model_copy(update={"max_line_bytes": 1_000_000})
    batch_id = await house.submit(data)
    await house.validator.run_once()
    batch = await house.batch(batch_id)
    assert (batch.status, batch.failed_at) == (BatchStatus.FAILED, int(house.clock()))
    assert batch.errors is not None
    assert [(each["code"], each["line"]) for each in batch.errors] == [(code, number)]
    assert await house.storage.keys("indexes") == []


async def test_too_many_lines_are_refused(house: House) -> None:
    house.settings = house.settings.model_copy(update={"max_lines": 5})
    batch_id = await house.submit(jsonl(line(n) for n in range(9)))
    await house.validator.run_once()
    errors = (await house.batch(batch_id)).errors
    assert errors is not None
    assert [(each["code"], each["line"]) for each in errors] == [("too_many_tasks", 6)]


async def test_batch_cancelled_before_validation_stays_cancelled(house: House) -> None:
    batch_id = await house.submit(jsonl(line(n) for n in range(9)))
    before = await house.batch(batch_id)
    await _set_status(house, batch_id, BatchStatus.CANCELLING)
    await house.validator.validate(before)
    [batch] = await house.until_ended(batch_id)
    assert (batch.status, batch.total, batch.output_file_id) == (BatchStatus.CANCELLED, 0, None)
    assert await house.storage.keys("indexes") == []


async def test_ready_slices_of_an_ended_batch_run_no_more(house: House) -> None:
    cancelled = await house.submit(jsonl(line(n) for n in range(40)))
    await house.plan()
    await _set_status(house, cancelled, BatchStatus.CANCELLING)
    [batch] = await house.until_ended(cancelled)
    assert (batch.status, batch.failed) == (BatchStatus.CANCELLED, 40)
    await house.sweeper.run_once()
    engine = ScriptedEngine()
    after = await house.submit(jsonl(line(n) for n in range(3)))
    async with house.working(engine, in_flight=8):
        await house.plan()
        await house.until_ended(after)
    assert sum(engine.runs.values()) == 3
    async with house.database.read() as session:
        slices = (await session.scalars(select(Slice))).all()
    assert {each.status for each in slices} == {SliceStatus.DONE}
    assert max(each.epoch for each in slices) == 1


async def test_slice_claimed_for_ended_batches_is_done_at_once(house: House) -> None:
    """The batch ends between the claim and the look at its rows; its plan may be swept already."""
    batch_id = await house.submit(jsonl(line(n) for n in range(3)))
    await house.plan()
    await _set_status(house, batch_id, BatchStatus.CANCELLED)
    await house.sweeper.run_once()
    engine = ScriptedEngine()
    async with house.working(engine):
        await house.until(lambda: _done(house))
    assert not engine.runs


async def test_two_validators_leave_a_batch_whole(house: House) -> None:
    batch_id = await house.submit(jsonl(line(n) for n in range(30)))
    before = await house.batch(batch_id)
    await asyncio.gather(*(house.validator.validate(before) for _ in range(4)))
    await house.planner.run_once()
    assert len(await house.storage.folders("indexes")) == 1
    async with house.working(ScriptedEngine()):
        [batch] = await house.until_ended(batch_id)
    assert len((await house.results(batch))[0]) == 30


async def test_request_that_raises_is_an_error_line_of_its_own(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    batch_id = await house.submit(jsonl(line(n) for n in range(9)))
    await house.plan()
    engine = ScriptedEngine()
    run = engine.run

    async def raising(endpoint: str, body: dict[str, Any], rid: str, rank: int) -> ScriptedAnswer:
        if body["messages"][-1]["content"] == "request 4":
            raise RecursionError("too deep")
        return await run(endpoint, body, rid, rank)

    monkeypatch.setattr(engine, "run", raising)
    async with house.working(engine):
        [batch] = await house.until_ended(batch_id)
    output, errors = await house.results(batch)
    assert len(output) == 8
    assert errors["id-4"]["error"]["message"] == "The engine failed on it in 3 attempts: RecursionError: too deep"


async def test_batch_that_cannot_be_validated_does_not_stop_another(house: House) -> None:
    async with house.database.write() as session:
        session.add(Model(name="broken", source="/nonexistent/model", created_at=0))
    stuck = await house.submit(jsonl([line(1, body={"model": "broken", "messages": ["x"]})]))
    good = await house.submit(jsonl(line(n) for n in range(3)))
    validator = house.validator
    while await validator.run_once():
        pass
    assert (await house.batch(stuck)).status == BatchStatus.VALIDATING
    assert (await house.batch(good)).status == BatchStatus.IN_PROGRESS
    assert not await validator.run_once()  # it rests
    house.clock.now += 61
    assert await validator.run_once()


async def test_commit_of_unknown_outcome_deletes_nothing(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database commits, and its answer is lost: the files that the row now names must stay."""
    batch_id = await house.submit(jsonl(line(n) for n in range(3)))
    await house.plan()
    async with house.working(ScriptedEngine()):
        await house.until(lambda: _done(house))
    await _set_status(house, batch_id, BatchStatus.FINALIZING)
    before, finalizer = await house.batch(batch_id), house.finalizer
    write = house.database.write

    @asynccontextmanager
    async def losing() -> AsyncGenerator[AsyncSession, None]:
        async with write() as session:
            yield session
        raise ConnectionResetError

    with monkeypatch.context() as patch:
        patch.setattr(house.database, "write", losing)
        with pytest.raises(ConnectionResetError):
            await finalizer.finalize(before)
    batch = await house.batch(batch_id)
    assert batch.status == BatchStatus.COMPLETED
    assert len((await house.results(batch))[0]) == 3


async def test_window_is_bounded_in_tokens(house: House) -> None:
    batch_id = await house.submit(jsonl(line(n) for n in range(20)))
    await house.validator.run_once()
    batch = await house.batch(batch_id)
    records = await RequestIndex(house.storage, batch.index_id or "").read(0, 20)
    house.settings = house.settings.model_copy(update={"window_tokens": int(records["tokens"][:7].sum())})
    await house.planner.run_once()
    assert (await house.batch(batch_id)).planned == 7
    house.settings = house.settings.model_copy(update={"window_tokens": 1})
    await house.planner.run_once()
    assert (await house.batch(batch_id)).planned == 8  # a window holds at least one request


async def test_damaged_segment_costs_only_its_own_answers(house: House) -> None:
    batch_id = await house.submit(jsonl(line(n) for n in range(8)))
    await house.plan()
    await house.storage.put("shards/1/00000000-00000000", b'["batch_x",1,tr')
    engine = ScriptedEngine()
    async with house.working(engine):
        [batch] = await house.until_ended(batch_id)
    assert len((await house.results(batch))[0]) == 8


async def test_sweeper_deletes_what_a_crash_left_and_nothing_young(house: House) -> None:
    batch_id = await house.submit(jsonl(line(n) for n in range(3)))
    await house.plan()
    for key in ("plans/plan_x/order", "indexes/index_x/records", "files/file-x"):
        await house.storage.put(key, b"left by a crash")
    needed = await house.storage.keys("")
    house.clock.now = time.time()
    assert not await house.sweeper.run_once()
    assert await house.storage.keys("") == needed
    house.clock.now += 3601
    assert await house.sweeper.run_once()
    left = await house.storage.keys("")
    assert not [key for key in left if "_x" in key or "-x" in key]
    assert len(left) == len(needed) - 3
    async with house.working(ScriptedEngine()):
        [batch] = await house.until_ended(batch_id)
    assert len((await house.results(batch))[0]) == 3
