"""The historian: every ten seconds, records what the workers are doing and how far the running batches have come."""

from collections.abc import Callable, Sequence
from typing import Any

from redis.asyncio import Redis
from sqlalchemy import exists, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from service.db.sessions import Database
from service.db.tables import Batch, BatchStatus, SliceBatch, SliceStatus, fixed
from service.estimates.paces import Paces
from service.metrics.history import History
from service.queue.counts import Counts
from service.queue.progress import Heartbeat, Progress

# Summed over workers and their ranks; named as in a heartbeat's engine state.
GAUGES = ("running", "waiting", "kv_of_left", "kv_of_right", "kv_capacity", "online_kv", "kv_kept_for_online")
# Rates per second, summed over workers.
RATES = (
    "input_tokens_per_second",
    "output_tokens_per_second",
    "admitted_prompt_tokens_per_second",
    "admitted_cached_tokens_per_second",
    "compute_per_second",
    "reads_per_second",
    "retractions_per_second",
    "online_seconds_per_second",
    "batches_seconds_per_second",
)
MODELLED = ("compute_per_second", "reads_per_second")  # by the cost model, which does not describe every machine
MOST_BATCHES = 1000  # recorded individually
_IN_PROGRESS = Batch.status == fixed(BatchStatus.IN_PROGRESS)
_LEASED = exists().where(SliceBatch.batch_id == Batch.id, SliceBatch.status == fixed(SliceStatus.LEASED))
# Batches that have begun to run, or whose end is under way.
_IS_UNDER_WAY = Batch.status.in_([BatchStatus.FINALIZING, BatchStatus.CANCELLING]) | (
    _IN_PROGRESS & (_LEASED | (Batch.completed + Batch.failed > 0))
)
_UNFINISHED = select(func.coalesce(func.sum(Batch.total - Batch.completed - Batch.failed), 0)).where(
    _IN_PROGRESS, ~Batch.held
)


class Historian:
    """Records one point of history per interval, whichever process's turn it is."""

    def __init__(self, database: Database, redis: Redis, clock: Callable[[], float]) -> None:
        self._database = database
        self._history = History(redis)
        self._heartbeat = Heartbeat(redis)
        self._progress = Progress(redis)
        self._clock = clock
        self._paces = Paces()

    async def run_once(self) -> bool:
        """Record one point if it is due. Returns whether it was."""
        if not await self._history.is_due():
            return False
        now = int(self._clock())
        async with self._database.read() as session:
            running = (await session.scalars(select(Batch).where(_IS_UNDER_WAY).limit(MOST_BATCHES))).all()
            unfinished = int((await session.execute(_UNFINISHED)).scalar_one())
            ended = await self._ended(session)
        answered = {batch.id: batch.completed + batch.failed for batch in ended}
        alive = await self._heartbeat.alive()
        told = await self._progress.counts_of(self._database, [batch.id for batch in running])
        for batch in running:
            counts = told.get(batch.id, Counts())
            answered[batch.id] = counts.answered
            if batch.status == BatchStatus.IN_PROGRESS:
                unfinished -= max(counts.answered - batch.completed - batch.failed, 0)
                await self._history.note_batch(batch.id, now, counts)
        seen = {batch.id: batch for batch in (*running, *ended)}  # a batch may end between the two queries
        self._paces.look(list(seen.values()), answered, {state["model"] for state in alive}, now)
        if paces := self._paces.by_model:  # none in a fresh process, which must not overwrite another's
            await self._history.note_paces(paces)
        point = {"at": now, "unfinished": unfinished, "answers_per_second": self._paces.answers_per_second}
        await self._history.note({**point, **summed(alive)})
        return True

    async def _ended(self, session: AsyncSession) -> Sequence[Batch]:
        """Return the batches that ended since the last look."""
        if self._paces.looked_at is None:
            return []
        ended = select(Batch).where(Batch.ended_at >= self._paces.looked_at, Batch.status != BatchStatus.FAILED)
        return (await session.scalars(ended.limit(MOST_BATCHES))).all()


def summed(workers: list[dict[str, Any]]) -> dict[str, float]:
    """Return one point that sums up what all workers are doing."""
    ranks = [rank for worker in workers for rank in worker.get("engine") or []]
    point: dict[str, float] = {"workers": len(workers)}
    for name in GAUGES:
        point[name] = sum(rank.get(name, 0) for rank in ranks)
    point["kv_of_batches"] = point["kv_of_left"] + point["kv_of_right"]
    is_timed = any(worker.get("is_timed", True) for worker in workers)
    for name in RATES:
        if is_timed or name not in MODELLED:
            point[name] = round(sum(worker.get(name, 0.0) for worker in workers), 6)
    if admitted := point["admitted_prompt_tokens_per_second"]:
        point["cached_share"] = round(point["admitted_cached_tokens_per_second"] / admitted, 4)
    return point
