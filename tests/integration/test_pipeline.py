"""From a file to its answers: exactly one line for every request, as planned, refused, cancelled or late."""

import asyncio
import io
import json

import pytest
from sqlalchemy import func, select, update

from service.cli.start import log_to
from service.db.tables import Batch, BatchStatus, Model, OnLongLine, Slice, Window
from service.db.tenant_tables import Project
from service.jobs.planner import Planner
from service.jobs.sweeper import KEEP_S
from service.objects.plan_artifact import PlanArtifact
from service.objects.request_index import RequestIndex
from service.objects.storage import CLOCK_KEY
from tests.integration.harness import (
    Harness,
    ScriptedEngine,
    all_slices_done,
    completed_are,
    jsonl,
    line,
    set_status,
)
from tests.waiting import until


async def test_every_request_gets_its_own_answer(harness: Harness) -> None:
    data = b"\xef\xbb\xbf" + jsonl(line(n) for n in range(20)) + b"\n  \r\n" + jsonl(line(n) for n in range(20, 41))
    batch_id = await harness.submit(data.removesuffix(b"\n"))
    await harness.plan()
    async with harness.working(ScriptedEngine()):
        [batch] = await harness.until_ended(batch_id)
    output, errors = await harness.results(batch)
    assert batch.status == BatchStatus.COMPLETED
    assert not errors
    assert {key: each["response"]["body"]["choices"][0]["message"]["content"] for key, each in output.items()} == {
        f"id-{n}": f"request {n}" for n in range(41)
    }
    assert all(each["error"] is None and each["id"].startswith("batch_req_") for each in output.values())


async def test_requests_reach_the_engine_in_the_order_of_the_plan_and_batches_share_a_window(harness: Harness) -> None:
    first = await harness.submit(jsonl(line(n) for n in range(10)))
    second = await harness.submit(jsonl(line(n) for n in range(10, 20)))
    await harness.plan()
    engine = ScriptedEngine()
    async with harness.working(engine):
        batches = await harness.until_ended(first, second)
    assert [batch.completed for batch in batches] == [10, 10]
    async with harness.database.read() as session:
        [window] = (await session.scalars(select(Window))).all()
    # The engine sees requests of both batches in the order of the one plan, and which batch each is of.
    artifact = PlanArtifact(harness.storage, window.plan_id)
    header, places = await artifact.header(), await artifact.places(0, 20)
    assert header.batches == [first, second]
    assert header.sharing > 0
    assert header.sharing_kept >= 0.99
    planned = [int(place["request"]) + 10 * int(place["batch"]) for place in places]
    began = [int(content.split()[-1]) for content in engine.kinds]
    for first_place, count in header.slices:  # a worker reads several slices at once, whichever is there first begins
        wanted = planned[first_place : first_place + count]
        assert [each for each in began if each in wanted] == wanted
    assert set(engine.kinds.values()) == {first, second}


@pytest.mark.usefixtures("windows_apart")
async def test_later_window_comes_behind_an_earlier_one(harness: Harness) -> None:
    engine = ScriptedEngine()
    for start in (0, 10):
        await harness.submit(jsonl(line(n) for n in range(start, start + 10)))
        await harness.plan()
    async with harness.working(engine, in_flight=1):  # slice by slice, since those side by side may overtake each other
        await until(lambda: all_slices_done(harness))
    assert [int(content.split()[-1]) // 10 for content in engine.kinds] == [0] * 10 + [1] * 10


async def test_a_batch_beyond_the_quota_of_tokens_fails_with_its_reason(harness: Harness) -> None:
    first = await harness.submit(jsonl(line(n) for n in range(10)))
    await harness.plan()
    tokens = (await harness.batch(first)).prompt_tokens
    assert tokens > 10
    async with harness.database.write() as session:
        await session.execute(update(Project).values(max_enqueued_tokens=tokens + 5))
    second = await harness.submit(jsonl(line(n) for n in range(10)))
    await harness.plan()
    batch = await harness.batch(second)
    assert batch.status == BatchStatus.FAILED
    assert [error["code"] for error in batch.errors or []] == ["token_limit_exceeded"]
    assert (await harness.batch(first)).status == BatchStatus.IN_PROGRESS


async def test_two_projects_share_a_window(harness: Harness) -> None:
    async with harness.database.write() as session:
        session.add(Project(id="proj_other", name="other", weight=3.0, created_at=0))
    mine, theirs = [await harness.submit(jsonl(line(n) for n in range(40))) for _ in range(2)]
    async with harness.database.write() as session:
        await session.execute(update(Batch).where(Batch.id == theirs).values(project_id="proj_other"))
    settings = harness.settings.model_copy(update={"window_requests": 40})
    await harness.validator.run_once()
    await harness.validator.run_once()
    assert await Planner(harness.database, harness.storage, settings, harness.clock, harness.redis).run_once()
    assert ((await harness.batch(mine)).planned, (await harness.batch(theirs)).planned) == (10, 30)


async def test_window_is_bounded_and_a_batch_may_span_several(harness: Harness) -> None:
    harness.settings = harness.settings.model_copy(update={"window_requests": 15})
    batch_id = await harness.submit(jsonl(line(n) for n in range(40)))
    await harness.validator.run_once()
    for _ in range(3):
        await harness.planner.run_once()
    async with harness.database.read() as session:
        counts = await session.scalars(
            select(func.sum(Slice.count)).group_by(Slice.window_id).order_by(Slice.window_id)
        )
        assert [int(each) for each in counts] == [15, 15, 10]
    async with harness.working(ScriptedEngine()):
        [batch] = await harness.until_ended(batch_id)
    assert len((await harness.results(batch))[0]) == 40


async def test_refused_request_is_one_error_line(harness: Harness) -> None:
    batch_id = await harness.submit(jsonl(line(n) for n in range(10)))
    await harness.plan()
    async with harness.working(ScriptedEngine(statuses={"request 3": [400]})):
        [batch] = await harness.until_ended(batch_id)
    output, errors = await harness.results(batch)
    assert batch.status == BatchStatus.COMPLETED
    assert len(output) == 9
    assert errors["id-3"]["response"]["status_code"] == 400
    assert errors["id-3"]["response"]["body"]["error"]["message"] == "The script answers this request with 400."
    assert errors["id-3"]["error"] is None


async def test_engine_fault_is_tried_again_and_then_said(harness: Harness) -> None:
    batch_id = await harness.submit(jsonl(line(n) for n in range(10)))
    await harness.plan()
    engine = ScriptedEngine(statuses={"request 3": [500, 503], "request 4": [500, 500, 500]})
    async with harness.working(engine):
        [batch] = await harness.until_ended(batch_id)
    output, errors = await harness.results(batch)
    assert (engine.runs["request 3"], engine.runs["request 4"]) == (3, 3)
    assert "id-3" in output
    assert errors["id-4"]["response"] is None
    assert errors["id-4"]["error"] == {
        "code": "server_error",
        "message": "The engine failed to answer this request in 3 attempts: The script answers this request with 500.",
    }


async def test_batch_of_failures_alone_completes_without_an_output_file(harness: Harness) -> None:
    batch_id = await harness.submit(jsonl([line(1)]))
    await harness.plan()
    async with harness.working(ScriptedEngine(statuses={"request 1": [400]})):
        [batch] = await harness.until_ended(batch_id)
    assert (batch.status, batch.output_file_id, batch.failed) == (BatchStatus.COMPLETED, None, 1)


async def test_cancel_keeps_finished_answers_and_codes_the_rest(harness: Harness) -> None:
    batch_id = await harness.submit(jsonl(line(n) for n in range(20)))
    await harness.plan()
    async with harness.working(ScriptedEngine(hold=asyncio.Event(), hold_after=7)):
        await until(lambda: completed_are(harness, batch_id, 7))
        await set_status(harness, batch_id, BatchStatus.CANCELLING)
        [batch] = await harness.until_ended(batch_id)
        await until(lambda: all_slices_done(harness))  # the worker lets go of what nobody wants
    output, errors = await harness.results(batch)
    assert (batch.status, len(output), len(errors)) == (BatchStatus.CANCELLED, 7, 13)
    assert {each["error"]["code"] for each in errors.values()} == {"batch_cancelled"}
    assert set(output) | set(errors) == {f"id-{n}" for n in range(20)}


async def test_cancel_of_one_batch_leaves_its_neighbour_in_the_slice_alone(harness: Harness) -> None:
    first = await harness.submit(jsonl(line(n) for n in range(4)))
    second = await harness.submit(jsonl(line(n) for n in range(4, 8)))
    await harness.plan()
    hold = asyncio.Event()
    async with harness.working(ScriptedEngine(hold=hold)):
        await asyncio.sleep(0.05)
        await set_status(harness, first, BatchStatus.CANCELLING)
        await harness.until_ended(first)
        hold.set()
        [batch] = await harness.until_ended(second)
    assert (batch.status, len((await harness.results(batch))[0])) == (BatchStatus.COMPLETED, 4)


async def test_expired_batch_keeps_finished_answers(harness: Harness) -> None:
    batch_id = await harness.submit(jsonl(line(n) for n in range(20)), window_s=600)
    await harness.plan()
    async with harness.working(ScriptedEngine(hold=asyncio.Event(), hold_after=7)):
        await until(lambda: completed_are(harness, batch_id, 7))
        assert await harness.expiry.run_once() == 0
        harness.clock.now += 601
        assert await harness.expiry.run_once() == 1
        [batch] = await harness.until_ended(batch_id)
    output, errors = await harness.results(batch)
    assert (batch.status, len(output), len(errors)) == (BatchStatus.EXPIRED, 7, 13)
    assert batch.finalizing_at is not None
    assert batch.expired_at is not None
    assert {each["error"]["message"] for each in errors.values()} == {
        "This request could not be executed before the completion window expired."
    }


async def test_ended_batch_leaves_only_its_files_in_storage(harness: Harness) -> None:
    batch_id = await harness.submit(jsonl(line(n) for n in range(9)))
    await harness.plan()
    async with harness.working(ScriptedEngine(statuses={"request 1": [400]})):
        [batch] = await harness.until_ended(batch_id)
    ids = [batch.input_file_id, batch.output_file_id, batch.error_file_id]
    files = sorted([*(f"files/{each}" for each in ids), CLOCK_KEY])
    before = await harness.storage.keys("")
    await harness.sweeper.run_once()
    kept = sorted([*(key for key in before if not key.startswith("indexes/")), CLOCK_KEY])
    assert await harness.storage.keys("") == kept  # for people, and for a database of before
    harness.clock.now += KEEP_S + 1
    await harness.sweeper.run_once()
    assert await harness.storage.keys("") == files
    assert await harness.redis.keys("batchweave:progress:*") == []


@pytest.mark.parametrize(
    ("data", "code", "number"),
    [
        (b"", "empty_file", None),
        (b"\n\n", "empty_file", None),
        (jsonl([line(1)]) + b"{oops\n", "invalid_json_line", 2),
        (jsonl([line(1), line(2), line(1)]), "duplicate_custom_id", 3),
        (b"\xef\xbb\xbf" + jsonl([line(1), line(1)]), "duplicate_custom_id", 2),
        (jsonl([line(1), line(2, url="/v1/completions")]), "url_mismatch", 2),
        (jsonl([line(1, body={"model": "gpt-9", "messages": ["x"]})]), "model_not_found", 1),
        (b"x" * 2_000_000, "invalid_request", 1),
    ],
)
async def test_bad_file_fails_with_its_code_and_line(
    harness: Harness, data: bytes, code: str, number: int | None
) -> None:
    harness.settings = harness.settings.model_copy(update={"max_line_bytes": 1_000_000})
    batch_id = await harness.submit(data)
    await harness.validator.run_once()
    batch = await harness.batch(batch_id)
    assert (batch.status, batch.failed_at) == (BatchStatus.FAILED, int(harness.clock()))
    assert batch.errors is not None
    assert [(each["code"], each["line"]) for each in batch.errors] == [(code, number)]
    assert await harness.storage.keys("indexes") == []


async def test_all_errors_are_told_in_the_order_of_the_lines(harness: Harness) -> None:
    twice = [line(number // 2) for number in range(3000)]
    batch_id = await harness.submit(jsonl([line(9999), *twice]) + b"x" * (harness.settings.max_line_bytes + 1))
    await harness.validator.run_once()
    errors = (await harness.batch(batch_id)).errors or []
    *told, last = errors
    assert len(told) > 200
    assert [each["line"] for each in told] == list(range(3, 3 + 2 * len(told), 2))
    assert {each["code"] for each in told} == {"duplicate_custom_id"}
    assert (last["code"], last["line"]) == ("too_many_errors", None)
    few = await harness.submit(jsonl([line(1), line(2, method="GET"), line(1)]) + b"x" * 9_000_000)
    await harness.validator.run_once()
    errors = (await harness.batch(few)).errors or []
    assert [(each["code"], each["line"]) for each in errors] == [
        ("invalid_method", 2),
        ("duplicate_custom_id", 3),
        ("invalid_request", 4),
    ]


async def test_what_exceeds_the_context_is_refused_with_its_lines(harness: Harness) -> None:
    async with harness.database.write() as session:
        await session.execute(update(Model).values(context_length=200))
    long = {"model": "test-model", "messages": [{"role": "user", "content": "word " * 500}]}
    asks = {**line(2)["body"], "max_tokens": 190}
    fits = {**line(3)["body"], "max_tokens": 50}
    bodies = [line(0), line(1, body=long), line(2, body=asks), line(3, body=fits), line(4, method="GET")]
    batch = await harness.submit(jsonl(bodies))
    await fails_as_a_file(harness, batch)
    await harness.validator.run_once()
    found = await harness.batch(batch)
    assert found.status == BatchStatus.FAILED
    assert [(error["line"], error["code"]) for error in found.errors or []] == [
        (2, "context_length_exceeded"),
        (3, "context_length_exceeded"),
        (5, "invalid_method"),
    ]
    assert "200 tokens" in (found.errors or [])[0]["message"]
    gigantic = {"model": "test-model", "messages": [{"role": "user", "content": "word " * 200_000}]}
    batch = await harness.submit(jsonl([line(1, body=gigantic)]))
    await fails_as_a_file(harness, batch)
    await harness.validator.run_once()
    assert [each["code"] for each in (await harness.batch(batch)).errors or []] == ["context_length_exceeded"]
    good = await harness.submit(jsonl([line(0), line(3, body=fits)]))
    await harness.validator.run_once()
    assert (await harness.batch(good)).status == BatchStatus.IN_PROGRESS


async def test_empty_prompts_are_planned_beside_others(harness: Harness) -> None:
    empty = [line(n, body={"model": "test-model", "messages": given}) for n, given in enumerate(("", []))]
    batch_id = await harness.submit(jsonl([*empty, line(2)]))
    await harness.plan()
    batch = await harness.batch(batch_id)
    assert (batch.status, batch.planned) == (BatchStatus.IN_PROGRESS, 3)


async def fails_as_a_file(harness: Harness, batch_id: str) -> None:
    async with harness.database.write() as session:
        await session.execute(update(Batch).where(Batch.id == batch_id).values(on_long_line=OnLongLine.FAIL_FILE))


async def test_a_request_that_is_too_long_is_planned_as_if_it_were_nothing(harness: Harness) -> None:
    async with harness.database.write() as session:
        await session.execute(update(Model).values(context_length=200))
    long = {"model": "test-model", "messages": [{"role": "user", "content": "word " * 100_000}], "max_tokens": 9}
    batch_id = await harness.submit(jsonl([line(0), line(1, body=long), line(2)]))
    await harness.plan()
    batch = await harness.batch(batch_id)
    assert (batch.status, batch.planned) == (BatchStatus.IN_PROGRESS, 3)
    assert batch.prompt_tokens < 200
    async with harness.working(ScriptedEngine()):
        await harness.until_ended(batch_id)


async def test_too_many_lines_are_refused(harness: Harness) -> None:
    harness.settings = harness.settings.model_copy(update={"max_lines": 5})
    batch_id = await harness.submit(jsonl(line(n) for n in range(9)))
    await harness.validator.run_once()
    errors = (await harness.batch(batch_id)).errors
    assert errors is not None
    assert [(each["code"], each["line"]) for each in errors] == [("too_many_tasks", 6)]
    blank = await harness.submit(b"\n" * 20 + jsonl([line(1)]))
    await harness.validator.run_once()
    errors = (await harness.batch(blank)).errors or []
    assert [(each["code"], each["line"]) for each in errors] == [("too_many_tasks", 11)]


async def test_batch_cancelled_before_validation_stays_cancelled(harness: Harness) -> None:
    batch_id = await harness.submit(jsonl(line(n) for n in range(9)))
    before = await harness.batch(batch_id)
    await set_status(harness, batch_id, BatchStatus.CANCELLING)
    await harness.validator.validate(before)
    [batch] = await harness.until_ended(batch_id)
    assert (batch.status, batch.total, batch.output_file_id) == (BatchStatus.CANCELLED, 0, None)
    assert await harness.storage.keys("indexes") == []


async def test_window_is_bounded_in_tokens(harness: Harness) -> None:
    batch_id = await harness.submit(jsonl(line(n) for n in range(20)))
    await harness.validator.run_once()
    batch = await harness.batch(batch_id)
    records = await RequestIndex(harness.storage, batch.index_id or "").read(0, 20)
    harness.settings = harness.settings.model_copy(update={"window_tokens": int(records["tokens"][:7].sum())})
    await harness.planner.run_once()
    assert (await harness.batch(batch_id)).planned == 7
    harness.settings = harness.settings.model_copy(update={"window_tokens": 1})
    await harness.planner.run_once()
    assert (await harness.batch(batch_id)).planned == 8  # a window holds at least one request


async def test_a_log_line_about_a_request_names_it_its_batch_and_its_slice(harness: Harness) -> None:
    batch_id = await harness.submit(jsonl(line(n) for n in range(6)))
    await harness.plan()
    written = io.StringIO()
    log_to(written)
    async with harness.working(ScriptedEngine(statuses={"request 4": [500]})):
        [batch] = await harness.until_ended(batch_id)
    logged = [json.loads(each) for each in written.getvalue().splitlines()]
    [failure] = [each for each in logged if each["event"] == "engine failed on a request"]
    assert (failure["batch"], failure["custom_id"]) == (batch_id, "id-4")
    output, _ = await harness.results(batch)
    assert output["id-4"]["response"]["request_id"] == failure["request_id"]
    [run] = [each for each in logged if each["event"] == "slice" and each["slice"] == failure["slice"]]
    assert (run["batches"], run["epoch"]) == ([batch_id], failure["epoch"])
    assert "custom_id" not in run
