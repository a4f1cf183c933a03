"""What looks for work or lists batches asks the database a few times, however many projects and batches there are."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from sqlalchemy import event, update

from service.db.sessions import Database
from service.db.tables import Batch
from service.db.tenant_tables import Project
from service.queue.urgency import Turns
from tests.integration.harness import Harness, jsonl, line

pytestmark = pytest.mark.dialects


@contextmanager
def statements(database: Database) -> Generator[list[str], None, None]:
    found: list[str] = []

    def note(_c: Any, _u: Any, statement: str, *_: Any) -> None:
        found.append(statement)

    event.listen(database.engine.sync_engine, "before_cursor_execute", note)
    try:
        yield found
    finally:
        event.remove(database.engine.sync_engine, "before_cursor_execute", note)


@pytest.mark.usefixtures("windows_apart")
async def test_announcing_for_many_projects(harness: Harness) -> None:
    async with harness.database.write() as session:
        for n in range(20):
            session.add(Project(id=f"proj_{n:02}", name=f"p{n}", weight=1.0, created_at=0))
    for n in range(20):
        batch_id = await harness.submit(jsonl(line(i) for i in range(2)))
        async with harness.database.write() as session:
            await session.execute(update(Batch).where(Batch.id == batch_id).values(project_id=f"proj_{n:02}"))
        await harness.plan()
    turns = Turns()
    await turns.most_urgent(harness.database, "test-model", harness.clock(), 64)
    with statements(harness.database) as found:
        ready = await turns.most_urgent(harness.database, "test-model", harness.clock(), 64)
    assert len(ready) == 20
    assert len({each.project_id for each in ready}) == 20
    assert len(found) <= 7, len(found)


@pytest.mark.usefixtures("windows_apart")
async def test_a_project_with_much_to_do_is_announced_beside_many_with_little(harness: Harness) -> None:
    harness.settings = harness.settings.model_copy(update={"slice_requests": 1})
    async with harness.database.write() as session:
        for n in range(12):
            weight = 1000.0 if n == 0 else 1.0
            session.add(Project(id=f"proj_{n:02}", name=f"p{n}", weight=weight, created_at=0))
    for n in range(12):
        batch_id = await harness.submit(jsonl(line(i) for i in range(80 if n == 0 else 2)))
        async with harness.database.write() as session:
            await session.execute(update(Batch).where(Batch.id == batch_id).values(project_id=f"proj_{n:02}"))
        await harness.plan()
    ready = await Turns().most_urgent(harness.database, "test-model", harness.clock(), 64)
    assert [each.project_id for each in ready] == ["proj_00"] * 64
    assert [each.slice_id for each in ready] == sorted(each.slice_id for each in ready)


async def test_a_page_of_batches(harness: Harness, url: str) -> None:
    for _ in range(12):
        await harness.submit(jsonl(line(i) for i in range(2)))
    await harness.plan()
    async with httpx.AsyncClient(base_url=url) as client:
        found = (await client.get("/v1/batches", params={"limit": 100})).json()["data"]
    assert len(found) == 12
