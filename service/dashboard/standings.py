"""Counts the running, waiting, held and finished batches for the overview."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, case, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from service.db.clock import DAY_S
from service.db.moves import LIVE
from service.db.tables import Batch, BatchStatus, SliceBatch, SliceStatus, fixed

SHOWN = 10
# A worker holds a lease on part of the batch, or its files are being written.
_RUNS = Batch.status.in_((BatchStatus.FINALIZING, BatchStatus.CANCELLING)) | (
    (Batch.status == BatchStatus.IN_PROGRESS)
    & Batch.id.in_(select(SliceBatch.batch_id).where(SliceBatch.status == fixed(SliceStatus.LEASED)))
)
_WAITS = Batch.status.in_(LIVE) & ~Batch.held


@dataclass(frozen=True, slots=True)
class Standings:
    """The numbers of batches by state.

    `oldest_at`: when the oldest running or waiting batch was created, in unix seconds.
    """

    running: int
    waiting: int
    held: int
    oldest_at: int | None
    completed: int  # in the last day
    failed: int  # or expired, in the last day


async def standings(session: AsyncSession, mine: ColumnElement[bool], now: float) -> Standings:
    """Count batches by state. Finished ones count for a day, so that the page does not get slower over the years."""

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
    """Return the running batches, then the waiting ones, each by deadline; at most `SHOWN` in total."""
    found = list[Batch]()
    for which in (_WAITS & _RUNS, _WAITS & ~_RUNS):
        query = select(Batch).where(mine, which).order_by(Batch.expires_at, Batch.seq).limit(SHOWN - len(found))
        found += (await session.scalars(query)).all()
    return found
