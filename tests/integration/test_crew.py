"""Several workers of one model divide what is left by how fast each is, and every request runs once."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from unittest.mock import patch

import pytest
from sqlalchemy import select, update
from sqlalchemy.exc import OperationalError

from benchmarks.paced import PacedEngine
from service.db.tables import Batch, BatchStatus, Slice, SliceBatch
from service.objects.plan_artifact import SLICE_BYTES
from service.queue.crew import CrewBoard
from service.queue.leases import Leases
from service.worker.script import Rule
from tests.integration.harness import Harness, jsonl, line
from tests.waiting import first_of, until

pytestmark = pytest.mark.dialects

AT_ONCE = 16  # a quarter of IN_FLIGHT, as a worker assumes
IN_FLIGHT = 64  # all requests of most tests
SLICES = 8


def paced(seconds: float = 0.05) -> PacedEngine:
    return PacedEngine(AT_ONCE, lambda _: seconds)


class HeldEngine(PacedEngine):
    """Ends no request until a test lets it, so that it has what it took for as long as the machine needs."""

    def __init__(self) -> None:
        super().__init__(AT_ONCE, lambda _: 0.05)
        self.released = asyncio.Event()

    async def pause(self, rule: Rule, seconds: float, aborted: asyncio.Event) -> bool:
        await first_of(self.released, aborted)
        return await super().pause(rule, seconds, aborted)


def answered(*engines: PacedEngine) -> list[int]:
    return [engine.runs.total() for engine in engines]


def each_once(*engines: PacedEngine) -> bool:
    return set(sum((engine.runs for engine in engines), Counter[str]()).values()) == {1}


@asynccontextmanager
async def crew(harness: Harness, *engines: PacedEngine) -> AsyncGenerator[None]:
    async with AsyncExitStack() as stack:
        for number, engine in enumerate(engines):
            await stack.enter_async_context(harness.working(engine, f"w{number}", IN_FLIGHT))
        yield


async def both_are_there(harness: Harness) -> bool:
    return len(await CrewBoard(harness.redis, "test-model").look()) == 2


async def test_a_batch_that_one_worker_could_hold_is_divided(harness: Harness) -> None:
    engines = HeldEngine(), HeldEngine()
    async with crew(harness, *engines):
        await until(lambda: both_are_there(harness))
        batch_id = await harness.submit(jsonl(line(n) for n in range(64)))
        await harness.plan()
        await until(lambda: min(answered(*engines)) >= AT_ONCE)
        for engine in engines:
            engine.released.set()
        [batch] = await harness.until_ended(batch_id)
    assert each_once(*engines)
    assert len((await harness.results(batch))[0]) == 64


async def test_the_slower_worker_gets_less(harness: Harness) -> None:
    engines = paced(0.02), paced(2.0)  # far apart, because a busy machine makes both slower
    async with crew(harness, *engines):
        batch_id = await harness.submit(jsonl(line(n) for n in range(400)))
        await harness.plan()
        await harness.until_ended(batch_id)
    fast, slow = answered(*engines)
    assert each_once(*engines)
    assert fast + slow == 400
    assert slow < fast


async def leased(harness: Harness) -> int:
    async with harness.database.read() as session:
        return len((await session.scalars(select(Slice).where(Slice.status == "leased"))).all())


async def are_leased(harness: Harness, slices: int) -> bool:
    await harness.reconciler.run_once()
    return await leased(harness) >= slices


async def has_slices(harness: Harness, worker: str) -> bool:
    await harness.reconciler.run_once()
    async with harness.database.read() as session:
        return bool(
            (await session.scalars(select(Slice).where(Slice.owner == worker, Slice.offsets.is_not(None)))).all()
        )


async def has_run(harness: Harness, engine: PacedEngine, requests: int) -> bool:
    await harness.reconciler.run_once()
    return engine.runs.total() >= requests


async def test_a_worker_that_comes_late_is_handed_what_has_not_begun(harness: Harness) -> None:
    engines = HeldEngine(), paced(0.01)
    batch_id = await harness.submit(jsonl(line(n) for n in range(64)))
    await harness.plan()
    async with harness.working(engines[0], "w0", IN_FLIGHT):
        await until(lambda: are_leased(harness, SLICES))  # all there is
        async with harness.working(engines[1], "w1", IN_FLIGHT):
            await until(lambda: has_run(harness, engines[1], 20))
            engines[0].released.set()
            [batch] = await harness.until_ended(batch_id)
    assert each_once(*engines)
    assert len((await harness.results(batch))[0]) == 64
    async with harness.database.read() as session:
        parts = (await session.scalars(select(Slice).where(Slice.offsets.is_not(None)))).all()
        totals = (await session.scalars(select(SliceBatch.total))).all()
    assert len(parts) >= 2, "what was given, and what was kept"
    assert (sum(totals), batch.slices_left) == (64, 0)


@pytest.mark.slow
async def test_what_was_handed_over_is_given_back_whole(harness: Harness) -> None:
    """The worker that has it stops, and the third one runs the rest of it."""
    engines = paced(60.0), paced(60.0), paced(0.01)
    batch_id = await harness.submit(jsonl(line(n) for n in range(64)))
    await harness.plan()
    async with harness.working(engines[0], "w0", IN_FLIGHT):
        await until(lambda: are_leased(harness, SLICES))
        async with harness.working(engines[1], "w1", IN_FLIGHT):
            await until(lambda: has_slices(harness, "w1"))
    async with harness.working(engines[2], "w2", IN_FLIGHT):
        [batch] = await harness.until_ended(batch_id)
    assert engines[2].runs.total() == 64
    assert len((await harness.results(batch))[0]) == 64


async def test_a_batch_that_ends_is_not_handed_over(harness: Harness) -> None:
    engines = HeldEngine(), paced(0.01)
    batch_id = await harness.submit(jsonl(line(n) for n in range(64)))
    await harness.plan()
    original = Leases.hand_over

    async def ends_before(self: Leases, *arguments: object) -> bool:
        async with harness.database.write() as session:
            await session.execute(update(Batch).values(status=BatchStatus.CANCELLING))
        return await original(self, *arguments)  # type: ignore[arg-type]

    with patch.object(Leases, "hand_over", ends_before):
        async with harness.working(engines[0], "w0", IN_FLIGHT):
            await until(lambda: are_leased(harness, SLICES))
            async with harness.working(engines[1], "w1", IN_FLIGHT):
                [batch] = await harness.until_ended(batch_id)
    assert batch.status == BatchStatus.CANCELLED
    assert engines[1].runs.total() == 0
    async with harness.database.read() as session:
        assert not (await session.scalars(select(Slice).where(Slice.offsets.is_not(None)))).all()


@pytest.mark.parametrize("commits", [True, False])
async def test_a_hand_over_that_is_in_doubt_runs_each_request_once(harness: Harness, commits: bool) -> None:
    """The connection is lost at the commit, before or after the database has made it."""
    engines = HeldEngine(), paced(0.01)
    batch_id = await harness.submit(jsonl(line(n) for n in range(64)))
    await harness.plan()
    original, times = Leases.hand_over, Counter[str]()

    async def loses_the_answer(self: Leases, *arguments: object) -> bool:
        times["asked"] += 1
        if times["asked"] == 1:
            if commits:
                assert await original(self, *arguments)  # type: ignore[arg-type]
            raise OperationalError("COMMIT", {}, Exception("the connection is lost"))
        return await original(self, *arguments)  # type: ignore[arg-type]

    with patch.object(Leases, "hand_over", loses_the_answer):
        async with harness.working(engines[0], "w0", IN_FLIGHT):
            await until(lambda: are_leased(harness, SLICES))
            async with harness.working(engines[1], "w1", IN_FLIGHT):
                await until(lambda: times["asked"])
                engines[0].released.set()
                [batch] = await harness.until_ended(batch_id)
    assert each_once(*engines)
    assert len((await harness.results(batch))[0]) == 64


async def test_a_worker_holds_no_more_lines_than_fit_into_memory(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes no slice beside the first one until that has run, though its engine could."""
    monkeypatch.setattr("service.worker.room.MOST_BYTES", SLICE_BYTES + 1)
    engine = HeldEngine()
    async with crew(harness, engine):
        batch_id = await harness.submit(jsonl(line(n) for n in range(64)))
        await harness.plan()
        await until(lambda: has_run(harness, engine, 1))
        for _ in range(20):
            await harness.reconciler.run_once()
            await asyncio.sleep(0.05)
        assert await leased(harness) == 1
        engine.released.set()
        await harness.until_ended(batch_id)
    assert each_once(engine)
