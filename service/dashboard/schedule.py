"""A batch's slices in the order of their plan, for its page."""

from dataclasses import dataclass

from sqlalchemy import select

from service.db.sessions import Database
from service.db.tables import Slice, SliceBatch

MOST_SLICES = 2000


@dataclass(frozen=True, slots=True)
class Stretch:
    """A slice: which part of the batch's width it takes, and what has become of it."""

    slice_id: int
    left: float  # of the width, 0 to 1
    width: float
    status: str
    owner: str | None
    requests: int
    answered: int
    deaths: int


async def stretches(database: Database, batch_id: str) -> list[Stretch]:
    """Empty before the plan; the first so many of a very large batch."""
    async with database.read() as session:
        rows = (
            await session.execute(
                select(Slice, SliceBatch)
                .join(SliceBatch, SliceBatch.slice_id == Slice.id)
                .where(SliceBatch.batch_id == batch_id)
                .order_by(Slice.id)
                .limit(MOST_SLICES)
            )
        ).all()
    whole = sum(share.total for _, share in rows)
    found: list[Stretch] = []
    done = 0
    for each, share in rows:
        answered = share.completed + share.failed
        found.append(
            Stretch(
                each.id, done / whole, share.total / whole, each.status, each.owner, share.total, answered, each.deaths
            )
        )
        done += share.total
    return found
