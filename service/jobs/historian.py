"""The historian: every ten seconds, what the workers do and how far the running batches are."""

import math
from collections.abc import Callable
from typing import Any

from redis.asyncio import Redis
from sqlalchemy import select

from service.db.sessions import Database
from service.db.tables import Batch, BatchStatus
from service.queue.history import History
from service.queue.progress import Heartbeat, Progress

# Sums over workers and ranks, by the names of a heartbeat's engine.
GAUGES = ("running", "waiting", "kv_of_left", "kv_of_right", "kv_capacity", "retractions")
# Sums over workers of what they count per second.
RATES = (
    "input_tokens_per_second",
    "output_tokens_per_second",
    "admitted_prompt_tokens_per_second",
    "admitted_cached_tokens_per_second",
    "compute_per_second",
    "reads_per_second",
)
PACE_S = 60.0


class Historian:
    def __init__(self, database: Database, redis: Redis, clock: Callable[[], float]) -> None:
        self._database = database
        self._history = History(redis)
        self._heartbeat = Heartbeat(redis)
        self._progress = Progress(redis)
        self._clock = clock
        self._answered: dict[str, int] = {}  # by running batch, when it was last looked
        self._looked_at = 0.0
        self._answers_per_second = 0.0

    async def run_once(self) -> bool:
        """Note one point; whether it was time for it."""
        if not await self._history.is_due():
            return False
        now = int(self._clock())
        async with self._database.read() as session:
            running = (
                await session.scalars(select(Batch).where(Batch.status == BatchStatus.IN_PROGRESS, ~Batch.held))
            ).all()
        unfinished, answered = 0, dict[str, int]()
        for batch in running:
            counts = await self._progress.counts(self._database, batch.id)
            unfinished += batch.total - counts.answered
            answered[batch.id] = counts.answered
            await self._history.note_batch(batch.id, now, counts)
        point = {"at": now, "unfinished": unfinished, "answers_per_second": self._pace(answered, now)}
        await self._history.note({**point, **summed(await self._heartbeat.alive())})
        return True

    def _pace(self, answered: dict[str, int], now: float) -> float:
        """Answers per second, the last minute most; a batch that has ended meanwhile adds nothing."""
        elapsed_s = now - self._looked_at
        if self._looked_at and elapsed_s > 0:
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
    return point
