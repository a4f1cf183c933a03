"""Where a batch stands: how many come before it, what it waits for, when it ends. What clients see as `batchweave`."""

import math
from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from service.db.sessions import Database
from service.db.tables import Batch, BatchStatus, Slice, SliceBatch, SliceStatus
from service.preview import Preview
from service.queue.counts import Counts
from service.serving import Serving

STANDARD_ERRORS = 2.0
LEAST_ANSWERS = 1.0  # that have not been forgotten; fewer say nothing of when others come


@dataclass(frozen=True, slots=True)
class Estimate:
    """Unix seconds. `earliest_at`: by the planner's cost model alone. The others by the pace of the model's answers:
    `expected_at` when all with an earlier deadline is done before it, `latest_at` when all that engines have is too.
    """

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


async def standing(
    database: Database, batch: Batch, counts: Counts, serving: dict[str, Serving], now: float
) -> Standing:
    """Of a batch that has not ended."""
    if batch.status == BatchStatus.VALIDATING:
        return Standing(waiting_for="validation")
    if batch.status != BatchStatus.IN_PROGRESS:
        return Standing(waiting_for="its files to be written")
    async with database.read() as session:
        position = await _before(session, batch)
        running = await _runs(session, batch.id)
    model = serving.get(batch.model or "", Serving())
    return Standing(position, _reason(batch, running, position, model), _estimate(batch, counts.answered, model, now))


async def _before(session: AsyncSession, batch: Batch) -> int:
    """Batches of the model with an earlier deadline."""
    earlier = (Batch.expires_at < batch.expires_at) | ((Batch.expires_at == batch.expires_at) & (Batch.seq < batch.seq))
    query = select(func.count()).where(
        Batch.model == batch.model, Batch.status == BatchStatus.IN_PROGRESS, ~Batch.held, earlier
    )
    return (await session.execute(query)).scalar_one()


async def _runs(session: AsyncSession, batch_id: str) -> bool:
    """Whether a worker has some of it."""
    leased = (
        select(Slice.id)
        .join(SliceBatch, SliceBatch.slice_id == Slice.id)
        .where(SliceBatch.batch_id == batch_id, Slice.status == SliceStatus.LEASED)
    )
    return (await session.scalars(leased.limit(1))).one_or_none() is not None


def _reason(batch: Batch, running: bool, position: int, model: Serving) -> str | None:
    if batch.held:
        return "its start" if batch.preview else "the preview of its plan"
    if not batch.planned:
        return "planning"
    if not model.alive:
        return f"a worker that serves {batch.model}: none is alive"
    if running:
        return None
    if model.draining == model.alive:
        return f"a worker that serves {batch.model}: all that are alive drain, until one is resumed"
    return f"{position} {'batch' if position == 1 else 'batches'} before it" if position else "room in an engine"


def _estimate(batch: Batch, answered: int, model: Serving, now: float) -> Estimate:
    work = work_of(batch)
    if not work or not model.alive:
        return Estimate()
    left_s = work.gpu_s * (batch.total - answered) / batch.total
    order = (batch.expires_at, batch.seq)
    before_s = sum(each.work_s for each in model.left if (each.expires_at, each.seq) < order)
    earliest_at = math.ceil(now + (left_s + (0.0 if answered else before_s)) / model.alive)
    if not model.pace.work or model.pace.answers < LEAST_ANSWERS:
        return Estimate(earliest_at)
    beside_s = sum(each.leased_s for each in model.left if (each.expires_at, each.seq) > order)
    expected_s = (left_s + before_s) / model.pace.work
    doubt = 1 + STANDARD_ERRORS / math.sqrt(max(1.0, min(model.pace.answers, batch.total - answered)))
    latest_s = (expected_s + beside_s / model.pace.work) * doubt
    return Estimate(earliest_at, math.ceil(now + expected_s), math.ceil(now + latest_s))
