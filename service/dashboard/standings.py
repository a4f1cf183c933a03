"""How many batches run, wait, are held and have ended, for the overview."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, case, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from service.db.moves import LIVE
from service.db.tables import Batch, BatchStatus, SliceBatch, SliceStatus, fixed

SHOWN = 10
DAY_S = 24 * 3600
# A worker has some of it, or its files are written.
_RUNS = Batch.status.in_((BatchStatus.FINALIZING, BatchStatus.CANCELLING)) | (
    (Batch.status == BatchStatus.IN_PROGRESS)
    & Batch.id.in_(select(SliceBatch.batch_id).where(SliceBatch.status == fixed(SliceStatus.LEASED)))
)
_WAITS = Batch.status.in_(LIVE) & ~Batch.held


@dataclass(frozen=True, slots=True)
class Standings:
    """`oldest_at`: unix seconds at which the oldest that runs or waits was created."""

    running: int
    waiting: int
    held: int
    oldest_at: int | None
    completed: int  # in the last day
    failed: int  # in the last day, or expired


async def standings(session: AsyncSession, mine: ColumnElement[bool], now: float) -> Standings:
    """What has ended is counted for a day, so that a page does not cost more from year to year."""

    def number(of: ColumnElement[bool]) -> ColumnElement[int]:
        return func.count(case((of, 1)))

    ended_badly = Batch.status.in_((BatchStatus.FAILED, BatchStatus.EXPIRED))
    live = select(
        number(_WAITS & _RUNS),
        number(_WAITS & ~_RUNS),
        number(Batch.held.is_(True)),
        func.min(case((_WAITS, Batch.created_at))),
    ).where(mine, Batch.status.in_(LIVE))
    ended = select(number(Batch.status == BatchStatus.COMPLETED), number(ended_badly)).where(
        mine, Batch.ended_at >= int(now) - DAY_S
    )
    return Standings(*(await session.execute(live)).one(), *(await session.execute(ended)).one())


async def next_batches(session: AsyncSession, mine: ColumnElement[bool]) -> Sequence[Batch]:
    """Those that run, then those that come next."""
    found = list[Batch]()
    for which in (_WAITS & _RUNS, _WAITS & ~_RUNS):
        query = select(Batch).where(mine, which).order_by(Batch.expires_at, Batch.seq).limit(SHOWN - len(found))
        found += (await session.scalars(query)).all()
    return found
