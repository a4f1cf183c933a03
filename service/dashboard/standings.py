"""How many batches run, wait, are held and have ended, for the overview."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, case, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from service.db.moves import LIVE
from service.db.tables import Batch, BatchStatus, Slice, SliceBatch, SliceStatus

SHOWN = 10
# A worker has some of it, or its files are written.
_RUNS = Batch.status.in_((BatchStatus.FINALIZING, BatchStatus.CANCELLING)) | (
    (Batch.status == BatchStatus.IN_PROGRESS)
    & Batch.id.in_(
        select(SliceBatch.batch_id)
        .join(Slice, Slice.id == SliceBatch.slice_id)
        .where(Slice.status == SliceStatus.LEASED)
    )
)
_WAITS = Batch.status.in_(LIVE) & ~Batch.held


@dataclass(frozen=True, slots=True)
class Standings:
    """`oldest_at`: unix seconds at which the oldest that runs or waits was created."""

    running: int
    waiting: int
    held: int
    completed: int
    failed: int  # or expired
    oldest_at: int | None


async def standings(session: AsyncSession, mine: ColumnElement[bool]) -> Standings:
    def number(of: ColumnElement[bool]) -> ColumnElement[int]:
        return func.count(case((of, 1)))

    ended_badly = Batch.status.in_((BatchStatus.FAILED, BatchStatus.EXPIRED))
    query = select(
        number(_WAITS & _RUNS),
        number(_WAITS & ~_RUNS),
        number(Batch.held.is_(True)),
        number(Batch.status == BatchStatus.COMPLETED),
        number(ended_badly),
        func.min(case((_WAITS, Batch.created_at))),
    ).where(mine)
    return Standings(*(await session.execute(query)).one())


async def next_batches(session: AsyncSession, mine: ColumnElement[bool]) -> Sequence[Batch]:
    """Those that run, then those that come next."""
    query = select(Batch).where(mine, _WAITS).order_by(case((_RUNS, 0), else_=1), Batch.expires_at, Batch.seq)
    return (await session.scalars(query.limit(SHOWN))).all()
