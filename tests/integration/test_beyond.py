"""What we give beyond OpenAI's API: output in input order, retries of what failed, causes, and where a batch stands."""

import asyncio
import json
import random
from collections.abc import Generator
from typing import Any

import openai
import pytest
from openai.types import Batch
from sqlalchemy import delete, update

from service.db.tables import Batch as BatchRow
from service.db.tables import DrainedWorker
from service.jobs.digest import CAUSES, Digest
from service.jobs.historian import Historian
from service.objects.storage import file_key
from service.queue import keys
from service.queue.progress import Heartbeat
from service.settings import Settings
from tests.conftest import Clock
from tests.integration.harness import Harness, ScriptedEngine, jsonl, line
from tests.integration.serving import CHAT, serve
from tests.waiting import until


@pytest.fixture
def client(settings: Settings, clock: Clock) -> Generator[openai.OpenAI, None, None]:
    with serve(settings, clock) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)


def create(client: openai.OpenAI, lines: list[dict[str, Any]], **extras: Any) -> str:
    file = client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    body: Any = {"extra_body": {"batchweave": extras}} if extras else {}
    return client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h", **body).id


def extras(batch: Batch) -> dict[str, Any]:
    return batch.model_dump()["batchweave"]


def retry(client: openai.OpenAI, batch_id: str, **headers: str) -> Batch:
    return client.post(f"/batches/{batch_id}/retry", cast_to=Batch, options={"headers": headers})


async def answered_are(harness: Harness, batch_id: str, wanted: int) -> bool:
    counts = await harness.progress.counts(harness.database, batch_id)
    return counts.completed + counts.failed == wanted


async def has_begun(engine: ScriptedEngine, requests: int) -> bool:
    return sum(engine.runs.values()) >= requests


async def run(harness: Harness, engine: ScriptedEngine, *batch_ids: str) -> None:
    await harness.plan()
    async with harness.working(engine):
        await harness.until_ended(*batch_ids)


@pytest.mark.parametrize("failing", [0, 3])
async def test_output_in_the_order_of_the_input(harness: Harness, client: openai.OpenAI, failing: int) -> None:
    numbers = list(range(60))
    random.Random(1).shuffle(numbers)
    statuses = {f"request {n}": [400] for n in numbers if failing and n % failing == 0}
    batch_id = create(client, [line(n) for n in numbers], output_order="input")
    await run(harness, ScriptedEngine(statuses=statuses), batch_id)
    batch = await harness.batch(batch_id)
    found: list[list[str]] = []
    for file_id in (batch.output_file_id, batch.error_file_id):
        raw = (await harness.storage.read(file_key(file_id))).splitlines() if file_id else []
        found.append([json.loads(each)["custom_id"] for each in raw])
    assert found[0] == [f"id-{n}" for n in numbers if f"request {n}" not in statuses]
    assert found[1] == [f"id-{n}" for n in numbers if f"request {n}" in statuses]
    await harness.results(batch)


async def test_what_was_cancelled_is_retried_and_nothing_else(harness: Harness, client: openai.OpenAI) -> None:
    batch_id = create(client, [line(n) for n in range(30)], output_order="input")
    await harness.plan()
    engine = ScriptedEngine(hold=asyncio.Event(), hold_after=12, statuses={"request 2": [400]})
    async with harness.working(engine):
        await until(lambda: answered_are(harness, batch_id, 12))
        await asyncio.to_thread(client.batches.cancel, batch_id)  # the worker may be in a transaction meanwhile
        [batch] = await harness.until_ended(batch_id)
    output, errors = await harness.results(batch)
    assert len(output) + len(errors) == 30
    again = retry(client, batch_id)
    assert (again.input_file_id, extras(again)["retry_of"]) == (batch.input_file_id, batch_id)
    second = ScriptedEngine()
    await run(harness, second, again.id)
    repeated, failed = await harness.results(await harness.batch(again.id))
    assert (set(repeated), failed) == (set(errors), {})
    assert set(second.runs) == {f"request {custom_id[3:]}" for custom_id in errors}
    with pytest.raises(openai.BadRequestError) as caught:
        retry(client, again.id)
    assert caught.value.code == "nothing_to_retry"


async def test_a_retry_that_is_tried_again_is_one_batch(harness: Harness, client: openai.OpenAI) -> None:
    batch_id = create(client, [line(n) for n in range(3)])
    with pytest.raises(openai.BadRequestError) as caught:
        retry(client, batch_id)
    assert caught.value.code == "batch_not_ended"
    await run(harness, ScriptedEngine(statuses={"request 1": [400]}), batch_id)
    first = retry(client, batch_id)
    assert retry(client, batch_id, **{"x-stainless-retry-count": "1"}).id == first.id
    assert retry(client, batch_id).id != first.id
    error_file = (await harness.batch(batch_id)).error_file_id or ""
    await harness.storage.delete(file_key(error_file))
    await harness.plan()
    batch = await harness.batch(first.id)
    assert batch.status == "failed"
    assert batch_id in (batch.errors or [{}])[0]["message"]
    client.files.delete(error_file)
    with pytest.raises(openai.BadRequestError) as gone:
        retry(client, batch_id)
    assert gone.value.code == "file_not_found"


async def test_failures_are_grouped_by_cause(harness: Harness, client: openai.OpenAI) -> None:
    batch_id = create(client, [line(n) for n in range(20)])
    statuses = {f"request {n}": [400] for n in range(7)} | {f"request {n}": [500] * 3 for n in (8, 9)}
    await run(harness, ScriptedEngine(statuses=statuses), batch_id)
    found = extras(client.batches.retrieve(batch_id))["failures"]
    assert [(each["count"], each["status_code"], each["code"]) for each in found] == [
        (7, 400, "invalid_request"),
        (2, None, "server_error"),
    ]
    assert set(found[1]["custom_ids"]) == {"id-8", "id-9"}
    assert len(found[0]["custom_ids"]) == 3


def test_equal_errors_are_one_cause_whatever_varies_in_a_long_message() -> None:
    digest = Digest()
    for n in range(5):
        message = f"after {10**n} s: " + "the engine says the same of each of them " * 20
        digest.add(json.dumps({"custom_id": str(n), "error": {"code": "c", "message": message}}).encode())
    assert [cause["count"] for cause in digest.causes] == [5]


def test_a_digest_is_bounded_and_takes_any_error() -> None:
    digest = Digest()
    for n in range(1000):
        code = chr(97 + n % 26) + chr(97 + n // 26 % 26)
        body = {"error": {"code": n, "message": [code]}}
        digest.add(json.dumps({"custom_id": f"{n}", "response": {"status_code": 400, "body": body}}).encode())
    digest.add(b'{"custom_id":"last","response":null,"error":{"code":"batch_expired","message":"late"}}')
    assert len(digest.causes) == CAUSES + 1
    assert sum(cause["count"] for cause in digest.causes) == 1001


@pytest.mark.usefixtures("windows_apart")
async def test_a_batch_says_what_it_waits_for_and_when_it_ends(
    harness: Harness, client: openai.OpenAI, clock: Clock
) -> None:
    first, second = (create(client, [line(n) for n in range(64)]) for _ in range(2))
    assert extras(client.batches.retrieve(first))["waiting_for"] == "validation"
    await harness.validator.run_once()
    await harness.validator.run_once()
    assert extras(client.batches.retrieve(first))["waiting_for"] == "planning"
    await harness.plan()
    found = extras(client.batches.retrieve(second))
    assert found["waiting_for"].startswith("a worker that serves test-model")
    assert (found["queue_position"], found["expected_at"]) == (1, None)
    assert found["prompt_tokens"] > 64
    assert found["expected_output_tokens"] > 0
    assert found["expected_gpu_seconds"] > 0
    state = {"name": "worker-a", "model": "test-model"}
    await Heartbeat(harness.redis).beat("worker-a", state)
    async with harness.database.write() as session:
        session.add(DrainedWorker(name="worker-a", since=0))
    await asyncio.sleep(0.2)  # it is not looked up at each call
    assert "all live workers are draining" in extras(client.batches.retrieve(second))["waiting_for"]
    async with harness.database.write() as session:
        await session.execute(delete(DrainedWorker))
    await asyncio.sleep(0.2)
    found = extras(client.batches.retrieve(second))
    assert found["waiting_for"] == "1 batch before it"
    assert found["earliest_at"] >= clock.now
    client.batches.cancel(second)
    await harness.until_ended(second)
    third = create(client, [line(n) for n in range(64)])
    await harness.plan()
    engine = ScriptedEngine(hold=asyncio.Event(), hold_after=32)
    historian = Historian(harness.database, harness.redis, clock)
    assert await historian.run_once()
    async with harness.working(engine, in_flight=128):
        await until(lambda: answered_are(harness, first, 32))
        await until(lambda: has_begun(engine, 33))  # so that a slice is held, not only about to be finished
        clock.now += 100
        await harness.redis.delete(keys.HISTORY_TURN)  # as if its time had passed
        assert await historian.run_once()
        batch = client.batches.retrieve(first)
        found, waiting = extras(batch), extras(client.batches.retrieve(third))
        await Heartbeat(harness.redis).beat("busy", {**state, "name": "busy", "online_seconds_per_second": 1.0})
        async with harness.database.write() as session:
            await session.execute(update(BatchRow).where(BatchRow.id == first).values(expires_at=clock.now + 80))
        await asyncio.sleep(0.2)
        late, kept = (extras(client.batches.retrieve(each))["late_because"] for each in (first, third))
    assert late == "online requests, which take 50% of the engines' time"  # in 100 s it ends, and alone in 50
    assert (found["late_because"], kept) == (None, None)
    assert batch.usage is not None
    assert (batch.usage.input_tokens, batch.usage.output_tokens) == (32 * 10, 32 * 2)  # also while it runs
    assert (found["waiting_for"], found["queue_position"]) == (None, 0)
    assert abs(found["expected_at"] - clock.now - 100) <= 1  # half is answered after 100 s
    # After what engines have of the third too, and two standard errors of 32 answers.
    assert found["expected_at"] < found["latest_at"] <= clock.now + 1.36 * (100 + 200) + 1
    assert 200 <= waiting["expected_at"] - clock.now <= 400  # its own 64, and what the first has left
