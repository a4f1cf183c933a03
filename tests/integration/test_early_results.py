"""Results that are read while the batch runs: what was read once stays, up to the finished file."""

import asyncio
import json
from collections.abc import Generator
from typing import Any

import httpx
import msgspec
import openai
import pytest
from sqlalchemy import func, select, update

from engine_ext.plugin.marks import NO_TERMS, Terms
from service import ids
from service.db.tables import Batch, BatchStatus, EarlyRun, Slice
from service.objects.early_results import EVERY_S, EarlyResults
from service.objects.shards import Answer, Shard, Usage
from service.objects.storage import LATE_S, Storage, file_key
from service.settings import Settings
from tests.conftest import Clock
from tests.integration.harness import Harness, ScriptedEngine, completed_are, jsonl, line, set_status
from tests.integration.serving import CHAT, serve
from tests.waiting import until

TOTAL = 60


@pytest.fixture
def client(settings: Settings, clock: Clock) -> Generator[openai.OpenAI, None, None]:
    with serve(settings, clock) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)


def create(client: openai.OpenAI, count: int = TOTAL, **extras: str) -> str:
    file = client.files.create(file=("in.jsonl", jsonl(line(n) for n in range(count))), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", extra_body={"batchweave": extras}
    )
    return batch.id


def early(client: openai.OpenAI, batch_id: str) -> tuple[str, str]:
    found = client.batches.retrieve(batch_id).model_dump()["batchweave"]
    return found["early_output_file_id"], found["early_error_file_id"]


async def get(client: openai.OpenAI, file_id: str, start: int | None = None) -> httpx.Response:
    """Beside the loop, in which a worker may hold the database's lock."""
    headers = {} if start is None else {"Range": f"bytes={start}-"}
    return await asyncio.to_thread(httpx.get, f"{client.base_url}files/{file_id}/content", headers=headers)


class Gate(ScriptedEngine):
    """Lets as many requests through as it is told."""

    def __init__(self, **kinds: Any) -> None:
        super().__init__(**kinds)
        self.room = asyncio.Semaphore(0)

    async def run(self, endpoint: str, body: dict[str, Any], rid: str, kind: str, terms: Terms = NO_TERMS) -> Any:
        await self.room.acquire()
        return await super().run(endpoint, body, rid, kind, terms)

    def open(self, count: int) -> None:
        for _ in range(count):
            self.room.release()


async def test_what_was_read_early_begins_the_files(harness: Harness, client: openai.OpenAI, clock: Clock) -> None:
    batch_id = create(client)
    output_id, errors_id = early(client, batch_id)
    nothing = await get(client, output_id)
    assert (nothing.status_code, nothing.content) == (200, b"")
    await harness.plan()
    engine = Gate(statuses={f"request {n}": [400] for n in range(0, TOTAL, 4)})
    seen, failed = b"", b""
    async with harness.working(engine, in_flight=8):
        for done in range(10, TOTAL, 10):
            engine.open(10)
            await until(lambda done=done: answered(harness, batch_id, done))
            clock.now += EVERY_S
            more = await get(client, output_id, len(seen))
            assert more.status_code == 206
            assert more.headers["batchweave-growing"] == "yes"
            assert more.headers["content-range"] == f"bytes {len(seen)}-{len(seen) + len(more.content) - 1}/*"
            seen += more.content
            failed = (await get(client, errors_id)).content
            assert (await get(client, output_id)).content == seen
            assert len((seen + failed).splitlines()) == done
        none = await get(client, output_id, len(seen))
        assert (none.status_code, none.headers["content-range"]) == (416, f"bytes */{len(seen)}")
        assert none.headers["batchweave-growing"] == "yes"
        engine.open(TOTAL)
        [batch] = await harness.until_ended(batch_id)
    await harness.results(batch)
    output = client.files.content(batch.output_file_id or "").content
    assert output.startswith(seen)
    assert len(output) > len(seen)
    assert (await get(client, output_id)).content == output
    assert (await get(client, errors_id)).content.startswith(failed)
    assert (await get(client, output_id, 10)).content == output[10:]
    end = await get(client, output_id, len(output))
    assert (end.status_code, end.headers["etag"]) == (416, f'"{batch.output_file_id}"')
    async with harness.database.read() as session:
        assert await session.scalar(select(func.count()).select_from(EarlyRun)) == 0


async def test_request_answered_twice_is_read_once(harness: Harness, client: openai.OpenAI, clock: Clock) -> None:
    """A worker that lost its lease may write on beside the next one, also segments that come before those read."""
    batch_id = create(client, 6)
    output_id, _ = early(client, batch_id)
    await harness.plan()
    async with harness.database.write() as session:
        [piece] = (await session.scalars(select(Slice))).all()
        piece.epoch = 2
    shard = Shard(harness.storage, piece.id)

    async def write(epoch: int, number: int, *requests: int) -> bytes:
        answers = [answer(batch_id, request, f"{epoch}.{number}") for request in requests]
        await shard.write(epoch, number, answers)
        clock.now += EVERY_S
        return (await get(client, output_id)).content

    first = await write(2, 1, 0, 1, 1)
    assert names(first) == ["id-0 2.1", "id-1 2.1"]
    second = await write(1, 1, 0, 2)
    assert second.startswith(first)
    assert names(second) == ["id-0 2.1", "id-1 2.1", "id-2 1.1"]
    third = await write(2, 2, 2, 3)
    assert third.startswith(second)
    assert names(third)[3:] == ["id-3 2.2"]
    await shard.write(2, 3, [answer(batch_id, request, "2.3") for request in (3, 4, 5)])
    await set_status(harness, batch_id, BatchStatus.FINALIZING)
    clock.now += EVERY_S
    assert (await get(client, output_id)).content == third
    [batch] = await harness.until_ended(batch_id)
    output = await harness.storage.read(file_key(batch.output_file_id or ""))
    assert output.startswith(third)
    assert names(output)[4:] == ["id-4 2.3", "id-5 2.3"]


async def test_readers_side_by_side_agree(harness: Harness, client: openai.OpenAI, clock: Clock) -> None:
    batch_id = create(client)
    await harness.plan()
    engine = Gate()
    others = [EarlyResults(harness.database, harness.storage, clock) for _ in range(4)]
    async with harness.working(engine, in_flight=8):
        for done in range(12, TOTAL, 12):
            engine.open(12)
            await until(lambda done=done: completed_are(harness, batch_id, done))
            clock.now += EVERY_S
            await asyncio.gather(*(each.refresh(batch_id) for each in others))
        seen = (await get(client, early(client, batch_id)[0])).content
        assert len(names(seen)) == len(set(names(seen))) == 48
        engine.open(TOTAL)
        [batch] = await harness.until_ended(batch_id)
    await harness.results(batch)
    assert (await harness.storage.read(file_key(batch.output_file_id or ""))).startswith(seen)


async def test_a_write_of_unknown_outcome_moves_nothing(
    harness: Harness, client: openai.OpenAI, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The segment is there although its write failed, and more is answered before the next try."""
    batch_id = create(client, 30)
    output_id, _ = early(client, batch_id)
    await harness.plan()
    put, fails = Storage.put, asyncio.Event()

    async def put_and_fail(storage: Storage, key: str, data: bytes) -> None:
        await put(storage, key, data)
        if key.startswith("shards/") and fails.is_set():
            raise TimeoutError(key)

    monkeypatch.setattr(Storage, "put", put_and_fail)
    engine = Gate()
    fails.set()
    async with harness.working(engine, in_flight=8):
        engine.open(3)
        await until(lambda: answers_in_shards(harness, 1))
        clock.now += EVERY_S
        seen = (await get(client, output_id)).content
        engine.open(5)
        await asyncio.sleep(0.2)
        fails.clear()
        engine.open(4)
        await until(lambda: completed_are(harness, batch_id, 12))
        clock.now += EVERY_S
        seen += (await get(client, output_id, len(seen))).content
        assert len(names(seen)) == len(set(names(seen))) == 12
        engine.open(30)
        [batch] = await harness.until_ended(batch_id)
    assert seen
    await harness.results(batch)
    assert (await harness.storage.read(file_key(batch.output_file_id or ""))).startswith(seen)


async def test_what_was_in_a_lost_segment_runs_again(harness: Harness, client: openai.OpenAI, clock: Clock) -> None:
    batch_id = create(client, 16)
    output_id, _ = early(client, batch_id)
    await harness.plan()
    async with harness.working(ScriptedEngine()):
        await until(lambda: completed_are(harness, batch_id, 16))
        assert len((await get(client, output_id)).content.splitlines()) == 16
        [key, *_] = await harness.storage.keys("shards")
        await harness.storage.delete(key)
        await until(lambda: status_is(harness, batch_id, BatchStatus.FINALIZING))
        clock.now += LATE_S + 1
        [batch] = await harness.until_ended(batch_id)
    output, errors = await harness.results(batch)
    assert (len(output), errors) == (16, {})


async def status_is(harness: Harness, batch_id: str, status: BatchStatus) -> bool:
    await harness.finalizer.run_once()
    return (await harness.batch(batch_id)).status == status


async def answers_in_shards(harness: Harness, least: int) -> bool:
    return len(await harness.storage.keys("shards")) >= least


async def test_early_results_are_their_projects_and_no_other_ids(harness: Harness, client: openai.OpenAI) -> None:
    batch_id = create(client)
    for file_id in (ids.early_file_ids(ids.batch_id())[0], early(client, batch_id)[0] + "x"):
        assert (await get(client, file_id)).status_code == 404
    async with harness.database.write() as session:
        await session.execute(update(Batch).where(Batch.id == batch_id).values(project_id="proj_other"))
    assert (await get(client, ids.early_file_ids(batch_id)[0])).status_code == 404
    ordered = create(client, output_order="input")
    assert early(client, ordered) == (None, None)
    found = await get(client, ids.early_file_ids(ordered)[0])
    assert (found.status_code, found.json()["error"]["code"]) == (400, "batch_not_ended")


async def answered(harness: Harness, batch_id: str, wanted: int) -> bool:
    counts = await harness.progress.counts(harness.database, batch_id)
    return counts.completed + counts.failed == wanted


def answer(batch_id: str, request: int, content: str) -> Answer:
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
    body = {"choices": [{"message": {"content": content}}], "usage": usage}
    found = {"id": "x", "custom_id": f"id-{request}", "response": {"status_code": 200, "body": body}, "error": None}
    return Answer(batch_id, request, True, Usage(1, 0, 1), msgspec.Raw(json.dumps(found).encode()))


def names(content: bytes) -> list[str]:
    found = [json.loads(each) for each in content.splitlines()]
    return [f"{each['custom_id']} {each['response']['body']['choices'][0]['message']['content']}" for each in found]
