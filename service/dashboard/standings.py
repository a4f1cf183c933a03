"""The states by which pages group batches, and how many batches are in each."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, func, literal, select
from sqlalchemy.ext.asyncio import AsyncSession

from service.db.clock import DAY_S
from service.db.moves import LIVE
from service.db.tables import Batch, BatchStatus, SliceBatch, SliceStatus, fixed

SHOWN = 10
ENDED = ("completed", "failed")  # groups that are counted over the last day
MOST_COUNTED = 1000  # of a group, so that a count does not get slower over the years
# A worker holds a lease on part of the batch, or its files are being written.
RUNS = Batch.status.in_((BatchStatus.FINALIZING, BatchStatus.CANCELLING)) | (
    (Batch.status == BatchStatus.IN_PROGRESS)
    & Batch.id.in_(select(SliceBatch.batch_id).where(SliceBatch.status == fixed(SliceStatus.LEASED)))
)
_WAITS = Batch.status.in_(LIVE) & ~Batch.held
_KEPT = Batch.deleted_at.is_(None)
_DUE = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)
_FAILED = (BatchStatus.FAILED, BatchStatus.EXPIRED)
GROUPS: dict[str, ColumnElement[bool]] = {
    "running": _WAITS & RUNS,
    "waiting": _WAITS & ~RUNS,
    "held": Batch.status.in_(LIVE) & Batch.held.is_(True),
    "completed": Batch.status == BatchStatus.COMPLETED,
    "failed": Batch.status.in_(_FAILED),
    "cancelled": Batch.status == BatchStatus.CANCELLED,
}


@dataclass(frozen=True, slots=True)
class Standings:
    """The numbers of batches by group, those of `completed` and `failed` in the last day.

    `oldest_at`: when the oldest running or waiting batch was created, in unix seconds.
    """

    running: int
    waiting: int
    held: int
    completed: int
    failed: int
    oldest_at: int | None


async def standings(session: AsyncSession, mine: ColumnElement[bool], now: float) -> Standings:
    """Count batches by group. Finished ones count for a day, so that the page does not get slower over the years."""
    lately = Batch.ended_at >= int(now) - DAY_S
    counts = {
        name: select(func.count())
        .select_from(Batch)
        .where(mine, _KEPT, GROUPS[name], *([lately] if name in ENDED else []))
        for name in ("running", "waiting", "held", *ENDED)
    }
    counts["oldest_at"] = select(func.min(Batch.created_at)).where(mine, _WAITS)
    columns = (each.scalar_subquery().label(name) for name, each in counts.items())
    return Standings(**(await session.execute(select(*columns))).mappings().one())


async def group_counts(session: AsyncSession, mine: ColumnElement[bool]) -> dict[str, int]:
    """Return how many batches each group has, counted up to MOST_COUNTED."""
    capped = [
        select(func.count()).select_from(select(literal(1)).where(mine, _KEPT, each).limit(MOST_COUNTED).subquery())
        for each in GROUPS.values()
    ]
    row = (await session.execute(select(*(each.scalar_subquery() for each in capped)))).one()
    return dict(zip(GROUPS, row, strict=True))


async def next_batches(session: AsyncSession, mine: ColumnElement[bool]) -> Sequence[Batch]:
    """Return the running batches, then the waiting ones, each by deadline; at most `SHOWN` in total."""
    found = list[Batch]()
    for which in (GROUPS["running"], GROUPS["waiting"]):
        query = select(Batch).where(mine, which).order_by(Batch.expires_at, Batch.seq).limit(SHOWN - len(found))
        found += (await session.scalars(query)).all()
    return found


async def due_batches(session: AsyncSession, mine: ColumnElement[bool]) -> Sequence[Batch]:
    """Return the batches whose deadlines come next, whether they run or wait; at most `SHOWN`."""
    query = select(Batch).where(mine, _WAITS, Batch.status.in_(_DUE))
    return (await session.scalars(query.order_by(Batch.expires_at, Batch.seq).limit(SHOWN))).all()


async def unchecked_since(session: AsyncSession) -> int | None:
    """Return when the oldest batch was created whose file no planner has checked; None if there is none."""
    waits = Batch.status == fixed(BatchStatus.VALIDATING)
    return await session.scalar(select(func.min(Batch.created_at)).where(waits))
