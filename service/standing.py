"""Where a batch stands: how many come before it, what it waits for, when it ends. What clients see as `batchweave`."""

import math
from dataclasses import dataclass

from redis.exceptions import RedisError
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from service.db.sessions import Database
from service.db.tables import Batch, BatchStatus, Slice, SliceBatch, SliceStatus
from service.preview import Preview
from service.queue.counts import Counts
from service.queue.progress import Heartbeat

TELLING_ANSWERS = 20  # from so many on, the pace of the answers says when the rest will be there
STANDARD_ERRORS = 2.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """Unix seconds. `earliest_at`: by the planner's cost model; the others by the pace of the answers so far."""

    earliest_at: int | None = None
    expected_at: int | None = None
    latest_at: int | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """Expected of a whole batch, as far as it was planned or previewed, by the planner's cost model."""

    compute_s: float
    memory_s: float
    output_tokens: float

    @property
    def gpu_s(self) -> float:
        return max(self.compute_s, self.memory_s)


def work_of(batch: Batch) -> Work | None:
    if batch.planned:
        share = batch.total / batch.planned
        planned = (batch.planned_compute_s, batch.planned_memory_s, batch.planned_output_tokens)
        return Work(*(each * share for each in planned))
    found = Preview.of(batch)
    return Work(found.compute_s, found.memory_s, found.output_tokens) if found else None


@dataclass(frozen=True, slots=True)
class Standing:
    """`position`: batches of the model that come before it; `waiting_for`: None while it runs or when it has ended."""

    position: int | None = None
    waiting_for: str | None = None
    estimate: Estimate = Estimate()


ENDED = Standing()


async def alive_by_model(heartbeat: Heartbeat) -> dict[str, int]:
    """How many workers serve each model."""
    try:
        alive = await heartbeat.alive()
    except (RedisError, OSError):
        return {}
    counts: dict[str, int] = {}
    for state in alive:
        counts[state["model"]] = counts.get(state["model"], 0) + 1
    return counts


async def standing(database: Database, batch: Batch, counts: Counts, workers: dict[str, int], now: float) -> Standing:
    """Of a batch that has not ended; `workers` as `alive_by_model` counts them."""
    if batch.status == BatchStatus.VALIDATING:
        return Standing(waiting_for="validation")
    if batch.status != BatchStatus.IN_PROGRESS:
        return Standing(waiting_for="its files to be written")
    async with database.read() as session:
        position, before_s = await _before(session, batch)
        running = await _runs(session, batch.id)
    alive = workers.get(batch.model or "", 0)
    return Standing(
        position,
        _reason(batch, running, position, alive),
        _estimate(batch, counts.answered, before_s, alive, now),
    )


async def _before(session: AsyncSession, batch: Batch) -> tuple[int, float]:
    """Batches of the model with an earlier deadline, and the seconds of work that they were planned with."""
    earlier = (Batch.expires_at < batch.expires_at) | ((Batch.expires_at == batch.expires_at) & (Batch.seq < batch.seq))
    query = select(func.count(), func.sum(Batch.planned_compute_s), func.sum(Batch.planned_memory_s)).where(
        Batch.model == batch.model, Batch.status == BatchStatus.IN_PROGRESS, ~Batch.held, earlier
    )
    count, compute_s, memory_s = (await session.execute(query)).one()
    return int(count), max(compute_s or 0.0, memory_s or 0.0)


async def _runs(session: AsyncSession, batch_id: str) -> bool:
    """Whether a worker has some of it."""
    leased = (
        select(Slice.id)
        .join(SliceBatch, SliceBatch.slice_id == Slice.id)
        .where(SliceBatch.batch_id == batch_id, Slice.status == SliceStatus.LEASED)
    )
    return (await session.scalars(leased.limit(1))).one_or_none() is not None


def _reason(batch: Batch, running: bool, position: int, alive: int) -> str | None:
    if batch.held:
        return "its start" if batch.preview else "the preview of its plan"
    if not batch.planned:
        return "planning"
    if not alive:
        return f"a worker that serves {batch.model}: none is alive"
    if running:
        return None
    return f"{position} {'batch' if position == 1 else 'batches'} before it" if position else "room in an engine"


def _estimate(batch: Batch, answered: int, before_s: float, alive: int, now: float) -> Estimate:
    left = batch.total - answered
    earliest_at = expected_at = latest_at = None
    work = work_of(batch)
    if work and alive:
        earliest_at = math.ceil(now + work.gpu_s * left / batch.total / alive)
        if not answered:
            earliest_at = math.ceil(earliest_at + before_s / alive)
    if answered >= TELLING_ANSWERS and alive:
        left_s = (now - (batch.in_progress_at or now)) * left / answered
        expected_at = math.ceil(now + left_s)
        latest_at = math.ceil(now + left_s * (1 + STANDARD_ERRORS / math.sqrt(answered)))
    return Estimate(earliest_at, expected_at, latest_at)
