"""A batch ends when its own requests are answered, though others share its slices."""

import asyncio
from typing import Any

import pytest
from sqlalchemy import select

from engine_ext.plugin.marks import NO_TERMS, Terms
from engine_ext.plugin.worker.answers import Answer
from service.db.tables import Batch, BatchStatus, SliceBatch
from tests.integration.harness import Harness, ScriptedEngine, jsonl, line
from tests.waiting import until

pytestmark = pytest.mark.dialects


class Waiting(ScriptedEngine):
    """Keeps what one prompt asks until a test lets it go."""

    def __init__(self, late: set[str], **how: Any) -> None:
        super().__init__(**how)
        self.late, self.free = late, asyncio.Event()

    async def run(self, endpoint: str, body: dict[str, Any], rid: str, kind: str, terms: Terms = NO_TERMS) -> Answer:
        if body["messages"][-1]["content"] in self.late:
            await self.free.wait()
        return await super().run(endpoint, body, rid, kind, terms)


async def shared(harness: Harness, *counts: int) -> list[str]:
    """Batches of so many requests that are planned together, each with numbers of its own."""
    found, first = [], 0
    for count in counts:
        found.append(await harness.submit(jsonl(line(n) for n in range(first, first + count))))
        first += count
    await harness.plan()
    async with harness.database.read() as session:
        shares = (await session.scalars(select(SliceBatch.slice_id))).all()
    assert len(set(shares)) < len(shares), "no slice is shared"
    return found


async def test_a_batch_does_not_wait_for_others_answers(harness: Harness) -> None:
    first, second = await shared(harness, 4, 4)
    engine = Waiting({f"request {n}" for n in range(4, 8)})
    async with harness.working(engine):
        [batch] = await harness.until_ended(first)
        assert batch.status == BatchStatus.COMPLETED
        assert len((await harness.results(batch))[0]) == 4
        assert (await harness.batch(second)).status == BatchStatus.IN_PROGRESS
        engine.free.set()
        [batch] = await harness.until_ended(second)
    assert len((await harness.results(batch))[0]) == 4
    assert set(engine.runs.values()) == {1}
    async with harness.database.read() as session:
        assert {left for left in await session.scalars(select(Batch.slices_left))} == {0}


async def test_a_share_that_is_done_stays_done_when_its_slice_is_leased_again(harness: Harness) -> None:
    first, second = await shared(harness, 4, 4)
    engine = Waiting({f"request {n}" for n in range(4, 8)})
    async with harness.working(engine) as task:
        await until(lambda: _done(harness, first))
        task.cancel()
    await harness.expire_leases()
    assert await _done(harness, first)
    [batch] = await harness.until_ended(first)
    engine.free.set()
    async with harness.working(engine, "worker-b"):
        [batch] = await harness.until_ended(second)
    assert (batch.completed, batch.slices_left) == (4, 0)
    assert (await harness.batch(first)).completed == 4
    assert all(engine.runs[f"request {n}"] == 1 for n in range(4))


async def _done(harness: Harness, batch_id: str) -> bool:
    async with harness.database.read() as session:
        mine = select(SliceBatch.status).where(SliceBatch.batch_id == batch_id)
        return set(await session.scalars(mine)) == {"done"}
