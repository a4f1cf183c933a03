"""The historian: every ten seconds, what the workers do and how far the running batches are."""

import math
from collections.abc import Callable
from typing import Any

from redis.asyncio import Redis
from sqlalchemy import case, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from service.db.sessions import Database
from service.db.tables import Batch, BatchStatus
from service.queue.history import History
from service.queue.progress import Heartbeat, Progress

# Sums over workers and ranks, by the names of a heartbeat's engine.
GAUGES = ("running", "waiting", "kv_of_left", "kv_of_right", "kv_capacity")
# Sums over workers of what they count per second.
RATES = (
    "input_tokens_per_second",
    "output_tokens_per_second",
    "admitted_prompt_tokens_per_second",
    "admitted_cached_tokens_per_second",
    "compute_per_second",
    "reads_per_second",
    "retractions_per_second",
)
PACE_S = 60.0
RUNNING = (BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING, BatchStatus.CANCELLING)


class Historian:
    def __init__(self, database: Database, redis: Redis, clock: Callable[[], float]) -> None:
        self._database = database
        self._history = History(redis)
        self._heartbeat = Heartbeat(redis)
        self._progress = Progress(redis)
        self._clock = clock
        self._answered: dict[str, int] = {}  # by running batch, when it was last looked
        self._looked_at: int | None = None
        self._answers_per_second = 0.0

    async def run_once(self) -> bool:
        """Note one point; whether it was time for it."""
        if not await self._history.is_due():
            return False
        now = int(self._clock())
        async with self._database.read() as session:
            running = (await session.scalars(select(Batch).where(Batch.status.in_(RUNNING), ~Batch.held))).all()
            answered = await self._ended(session)
        unfinished = 0
        for batch in running:
            counts = await self._progress.counts(self._database, batch.id)
            answered[batch.id] = counts.answered
            if batch.status == BatchStatus.IN_PROGRESS:
                unfinished += batch.total - counts.answered
                await self._history.note_batch(batch.id, now, counts)
        point = {"at": now, "unfinished": unfinished, "answers_per_second": self._pace(answered, now)}
        await self._history.note({**point, **summed(await self._heartbeat.alive())})
        return True

    async def _ended(self, session: AsyncSession) -> dict[str, int]:
        """Answers by batch of those that ended since the last look; those without one that count as failed are none."""
        if self._looked_at is None:
            return {}
        ended_at = func.coalesce(Batch.completed_at, Batch.cancelled_at, Batch.expired_at)
        count = case((Batch.status == BatchStatus.COMPLETED, Batch.completed + Batch.failed), else_=Batch.completed)
        rows = await session.execute(select(Batch.id, count).where(ended_at >= self._looked_at))
        return {batch_id: answers for batch_id, answers in rows}

    def _pace(self, answered: dict[str, int], now: int) -> float:
        """Answers per second, the last minute most."""
        if self._looked_at is not None and now > self._looked_at:
            elapsed_s = now - self._looked_at
            more = sum(count - self._answered.get(each, 0) for each, count in answered.items())
            weight = 1 - math.exp(-elapsed_s / PACE_S)
            self._answers_per_second += weight * (max(more, 0) / elapsed_s - self._answers_per_second)
        self._answered, self._looked_at = answered, now
        return round(self._answers_per_second, 6)


def summed(workers: list[dict[str, Any]]) -> dict[str, float]:
    """One point of what all workers do together."""
    ranks = [rank for worker in workers for rank in worker.get("engine") or []]
    point: dict[str, float] = {"workers": len(workers)}
    for name in GAUGES:
        point[name] = sum(rank.get(name, 0) for rank in ranks)
    for name in RATES:
        point[name] = round(sum(worker.get(name, 0.0) for worker in workers), 6)
    if admitted := point["admitted_prompt_tokens_per_second"]:
        point["cached_share"] = round(point["admitted_cached_tokens_per_second"] / admitted, 4)
    return point
