"""What is deleted is nowhere any more: no object, row or page says what it said."""

from collections.abc import AsyncIterator, Generator

import httpx
import openai
import pytest
from sqlalchemy import text, true

from service.db.deletions import forget_file
from service.db.tables import Base
from service.objects.storage import Storage
from service.settings import Settings
from tests.batches import CHAT
from tests.conftest import Clock
from tests.integration.harness import Harness, ScriptedEngine, jsonl, line
from tests.integration.serving import serve
from tests.integration.test_statements import statements

pytestmark = pytest.mark.dialects

MARK = "zebraquartz"
DAY_S = 86400


@pytest.fixture
def client(settings: Settings, clock: Clock) -> Generator[openai.OpenAI, None, None]:
    with serve(settings, clock) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)


def marked(number: int) -> dict[str, object]:
    found = line(number, custom_id=f"{MARK}-{number}")
    found["body"]["messages"][0]["content"] = f"{MARK} lives in room 12, and is asked"
    return found


async def rows_with(harness: Harness) -> set[str]:
    """The tables with a row that has the mark."""
    found = set[str]()
    for table in Base.metadata.tables.values():
        async with harness.database.read() as session:
            rows = (await session.execute(table.select())).all()
        found |= {table.name for row in rows if MARK in repr(row)}
    return found


async def objects_with(harness: Harness) -> set[str]:
    found = await harness.storage.keys("")
    return {key for key in found if MARK.encode() in await harness.storage.read(key)}


async def ran(harness: Harness, client: openai.OpenAI) -> openai.types.Batch:
    """A batch of marked requests, one of which failed."""
    file = client.files.create(file=(f"{MARK}.jsonl", jsonl(marked(n) for n in range(9))), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"about": "nothing"}
    )
    await harness.plan()
    async with harness.working(ScriptedEngine(statuses={"request 1": [400]})):
        await harness.until_ended(batch.id)
    await harness.sweeper.run_once()
    assert any(key.startswith("plans/") for key in await objects_with(harness))
    return client.batches.retrieve(batch.id)


async def test_deleted_files_leave_nothing_of_what_they_said(
    harness: Harness, client: openai.OpenAI, pages: httpx.AsyncClient
) -> None:
    batch = await ran(harness, client)
    for file_id in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
        client.files.delete(file_id or "")
    assert MARK not in (await pages.get(f"/batches/{batch.id}/schedule")).text
    await harness.sweeper.run_once()
    assert await objects_with(harness) == set()
    assert await rows_with(harness) == set()
    again = client.batches.retrieve(batch.id)
    [cause] = again.model_dump()["batchweave"]["failures"]
    assert (cause["count"], cause["custom_ids"]) == (1, [])


async def test_expired_files_leave_nothing_of_what_they_said(
    harness: Harness, client: openai.OpenAI, clock: Clock
) -> None:
    await ran(harness, client)
    clock.now += 31 * DAY_S
    await harness.expiry.run_once()
    await harness.sweeper.run_once()
    assert await objects_with(harness) == set()
    assert await rows_with(harness) == set()


async def test_a_batch_is_deleted_with_its_results(harness: Harness, client: openai.OpenAI, url: str) -> None:
    batch = await ran(harness, client)
    file = client.files.create(file=("a.jsonl", jsonl([line(1)])), purpose="batch")
    live = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    async with httpx.AsyncClient(base_url=f"{url}/v1") as http:
        assert (await http.delete(f"/batches/{live.id}")).json()["error"]["code"] == "batch_not_ended"
        gone = await http.delete(f"/batches/{batch.id}")
        assert gone.json() == {"id": batch.id, "object": "batch", "deleted": True}
        assert (await http.delete(f"/batches/{batch.id}")).status_code == 404
        assert (await http.get(f"/files/{batch.output_file_id}")).status_code == 404
        assert (await http.get(f"/files/{batch.input_file_id}")).status_code == 200
    await harness.sweeper.run_once()
    left = {key.split("/")[0] for key in await objects_with(harness)}
    assert left == {"files"}  # the input file
    assert await rows_with(harness) == {"files"}


async def test_object_storage_is_listed_once_an_hour(
    harness: Harness, client: openai.OpenAI, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing costs the more the more is kept, and what a client deletes goes without it."""
    listed, list_pages = list[str](), Storage.pages

    async def pages(storage: Storage, prefix: str) -> AsyncIterator[dict[str, float]]:
        listed.append(prefix)
        async for page in list_pages(storage, prefix):
            yield page

    monkeypatch.setattr(Storage, "pages", pages)
    sweeper = harness.sweeper
    for minute in range(121):
        await sweeper.run_once()
        assert len(listed) == 1 + minute // 60
        clock.now += 60


async def test_rows_of_long_ago_are_deleted(harness: Harness, client: openai.OpenAI, clock: Clock) -> None:
    await ran(harness, client)
    clock.now += 31 * DAY_S
    await harness.expiry.run_once()
    clock.now += 91 * DAY_S
    await harness.sweeper.run_once()
    await harness.sweeper.run_once()
    async with harness.database.read() as session:
        for table in ("batches", "files", "windows", "slices", "slice_batches"):
            assert not (await session.execute(text(f"SELECT count(*) FROM {table}"))).scalar_one(), table
    assert not await harness.storage.keys("files")


async def test_batches_may_be_deleted_while_they_are_listed(harness: Harness, client: openai.OpenAI, url: str) -> None:
    file = client.files.create(file=("a.jsonl", jsonl([line(1)])), purpose="batch")
    for _ in range(5):
        made = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        client.batches.cancel(made.id)
    while await harness.finalizer.run_once():
        pass
    async with httpx.AsyncClient(base_url=f"{url}/v1") as http:
        for each in client.batches.list(limit=2):
            assert (await http.delete(f"/batches/{each.id}")).status_code == 200
    assert not client.batches.list().data


async def test_what_a_retry_needs_is_not_deleted(harness: Harness, client: openai.OpenAI, url: str) -> None:
    batch = await ran(harness, client)
    async with httpx.AsyncClient(base_url=f"{url}/v1") as http:
        retry = (await http.post(f"/batches/{batch.id}/retry")).json()["id"]
        for path in (f"/batches/{batch.id}", f"/files/{batch.error_file_id}"):
            assert (await http.delete(path)).json()["error"]["code"] == "file_in_use"
        client.batches.cancel(retry)
        await harness.until_ended(retry)
        assert (await http.delete(f"/batches/{batch.id}")).status_code == 200


async def test_a_file_of_many_batches_is_deleted_by_few_statements(harness: Harness, client: openai.OpenAI) -> None:
    file = client.files.create(file=("a.jsonl", jsonl([line(1)])), purpose="batch")
    for _ in range(30):
        made = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        client.batches.cancel(made.id)
    while await harness.finalizer.run_once():
        pass
    async with harness.database.write() as session:
        with statements(harness.database) as found:
            assert await forget_file(session, true(), file.id, 1.0)
    assert len(found) < 12, found


async def test_an_index_goes_with_its_batch_and_one_failure_keeps_nothing_else(
    harness: Harness, client: openai.OpenAI, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Indexes count for no quota once their batch has ended."""
    sweeper = harness.sweeper
    await sweeper.run_once()  # it lists everything now, and for an hour no more
    for _ in range(3):
        batch_id = await harness.submit(jsonl([line(1)]))
        await harness.plan()
        client.batches.cancel(batch_id)
        await harness.until_ended(batch_id)
    indexes = await harness.storage.folders("indexes")
    assert len(indexes) == 3
    delete_all = Storage.delete_all

    async def failing(storage: Storage, prefix: str) -> None:
        if prefix == f"indexes/{indexes[1]}":
            raise PermissionError(prefix)
        await delete_all(storage, prefix)

    monkeypatch.setattr(Storage, "delete_all", failing)
    clock.now += 60
    await sweeper.run_once()
    assert await harness.storage.folders("indexes") == [indexes[1]]
