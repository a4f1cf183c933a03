"""The historian: every ten seconds, what the workers do and how far the running batches are."""

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


class Historian:
    def __init__(self, database: Database, redis: Redis, clock: Callable[[], float]) -> None:
        self._database = database
        self._history = History(redis)
        self._heartbeat = Heartbeat(redis)
        self._progress = Progress(redis)
        self._clock = clock

    async def run_once(self) -> bool:
        """Note one point; whether it was time for it."""
        if not await self._history.is_due():
            return False
        now = int(self._clock())
        async with self._database.read() as session:
            running = (await session.scalars(select(Batch).where(Batch.status == BatchStatus.IN_PROGRESS))).all()
        unfinished = 0
        for batch in running:
            counts = await self._progress.counts(self._database, batch.id)
            unfinished += batch.total - counts.answered
            await self._history.note_batch(batch.id, now, counts)
        await self._history.note({"at": now, "unfinished": unfinished, **summed(await self._heartbeat.alive())})
        return True


def summed(workers: list[dict[str, Any]]) -> dict[str, float]:
    """One point of what all workers do together."""
    ranks = [rank for worker in workers for rank in worker.get("engine") or []]
    point: dict[str, float] = {"workers": len(workers)}
    for name in GAUGES:
        point[name] = sum(rank.get(name, 0) for rank in ranks)
    for name in RATES:
        point[name] = round(sum(worker.get(name, 0.0) for worker in workers), 6)
    return point
