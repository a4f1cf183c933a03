"""What a page of a list costs does not grow with what others have."""

import asyncio
from typing import Any

import httpx
import pytest
from sqlalchemy import insert, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from service.api.batches import LISTED_ERRORS
from service.api.files import MOST_LISTED
from service.api.pages import page_rows
from service.db.sessions import Database
from service.db.tables import DEFAULT_PROJECT, Batch, BatchStatus, File
from tests.waiting import LIMIT_S

OURS, THEIRS, PAGE = 800, 8_000, 20
A_FILE = {"purpose": "batch", "filename": "f", "size_bytes": 1, "created_at": 0}
A_BATCH = {
    **{"status": BatchStatus.COMPLETED, "endpoint": "/v1/completions", "input_file_id": "f"},
    **{"completion_window": "24h", "created_at": 0, "expires_at": 9},
}


@pytest.mark.parametrize(("table", "row"), [(File, A_FILE), (Batch, A_BATCH)])
async def test_a_page_of_a_project_that_was_busy_long_ago(
    database: Database, table: type[File] | type[Batch], row: dict[str, Any]
) -> None:
    if database.engine.dialect.name != "postgresql":
        pytest.skip("each index of SQLite has the row's number at its end")
    async with database.write() as session:
        for project, count in (("ours", OURS), ("theirs", THEIRS)):
            rows = [{**row, "id": f"{project}-{number}", "project_id": project} for number in range(count)]
            await session.execute(insert(table), rows)
        await session.execute(text("ANALYZE"))

    async def rows_read(session: AsyncSession) -> int:
        """Return how many rows this session has read."""
        counts = "SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_xact_user_tables WHERE relname = :name"
        return await session.scalar(text(counts), {"name": table.__tablename__}) or 0

    middle = OURS // 2
    for after, first in ((None, OURS - 1), (f"ours-{middle}", middle - 1)):
        async with database.read() as session:
            before = await rows_read(session)
            found = await page_rows(session, table, select(table), "ours", after=after, limit=PAGE)
            read = await rows_read(session) - before
        assert [each.id for each in found] == [f"ours-{first - number}" for number in range(PAGE + 1)]
        assert read == len(found) + (after is not None)  # whose place is looked up


def test_one_page_never_holds_ten_thousand_files(database: Database, url: str) -> None:
    async def add() -> None:
        ours = {**A_FILE, "project_id": DEFAULT_PROJECT}
        rows = [{**ours, "id": f"file-{number:04}"} for number in range(MOST_LISTED + 5)]
        async with database.write() as session:
            await session.execute(insert(File), rows)

    asyncio.run(add())
    with httpx.Client(base_url=url, timeout=LIMIT_S) as client:
        page = client.get("/v1/files", params={"limit": 10_000}).json()
        assert (len(page["data"]), page["has_more"]) == (MOST_LISTED, True)
        rest = client.get("/v1/files", params={"limit": 10_000, "after": page["last_id"]}).json()
    assert [each["id"] for each in rest["data"]] == [f"file-{number:04}" for number in (4, 3, 2, 1, 0)]
    assert not rest["has_more"]


def test_a_list_has_few_causes_of_each_batch(database: Database, url: str) -> None:
    causes = [
        {"status_code": 400, "code": "c", "message": "m", "count": 50 - n, "custom_ids": ["a", "b", "c"]}
        for n in range(50)
    ]

    async def add() -> None:
        row = {**A_BATCH, "id": "batch_1", "project_id": DEFAULT_PROJECT, "causes": causes}
        async with database.write() as session:
            await session.execute(insert(Batch), [row])

    asyncio.run(add())
    with httpx.Client(base_url=url, timeout=LIMIT_S) as client:
        [listed] = client.get("/v1/batches").json()["data"]
        alone = client.get("/v1/batches/batch_1").json()
    assert alone["batchweave"]["failures"] == causes
    assert listed["batchweave"]["failures"] == [{**cause, "custom_ids": ["a"]} for cause in causes[:LISTED_ERRORS]]
