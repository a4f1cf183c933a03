"""Reads a batch's slices in plan order, and the prefix tree of its current planning window, for the batch's page."""

from dataclasses import dataclass

from sqlalchemy import func, select

from service.db.sessions import Database
from service.db.tables import Slice, SliceBatch, SliceStatus, Window, fixed
from service.objects.plan_artifact import PlanArtifact
from service.objects.plan_picture import PlanPicture
from service.objects.storage import Storage

MOST_SLICES = 2000


@dataclass(frozen=True, slots=True)
class Stretch:
    """A slice: the part of the batch's width that it takes, and its state."""

    slice_id: int
    left: float  # of the width, 0 to 1
    width: float
    status: str
    owner: str | None
    requests: int
    deaths: int


async def stretches(database: Database, batch_id: str) -> list[Stretch]:
    """Return the batch's slices in plan order, at most `MOST_SLICES`; empty before the batch is planned."""
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
        found.append(
            Stretch(
                each.id, done / whole, share.total / whole, _state(each, share), each.owner, share.total, each.deaths
            )
        )
        done += share.total
    return found


def _state(each: Slice, share: SliceBatch) -> str:
    """Return the slice's state, or "not_run" if it is done but none of it ran.

    That is so when the batch expired or was cancelled first.
    """
    is_empty = each.status == SliceStatus.DONE and not share.completed and not share.failed
    return "not_run" if is_empty else str(each.status)


@dataclass(frozen=True, slots=True)
class Drawing:
    """The prefix tree of a planning window, and the progress of its scan.

    `left`, `right`: how far the scan has come from each end, as shares of the width.
    """

    picture: PlanPicture
    left: float
    right: float
    slices: int
    begun: int


async def drawing(database: Database, storage: Storage, batch_id: str) -> Drawing | None:
    """Return the drawing of the batch's first unfinished window, or of its last; None if its picture is gone."""
    async with database.read() as session:
        mine = select(SliceBatch.slice_id).where(SliceBatch.batch_id == batch_id)
        firsts = [
            select(mine.where(SliceBatch.status == fixed(status)).order_by(SliceBatch.slice_id).limit(1).subquery())
            for status in (SliceStatus.READY, SliceStatus.LEASED)
        ]
        unfinished = [each for each in [await session.scalar(first) for first in firsts] if each is not None]
        slice_id = min(unfinished, default=await session.scalar(mine.order_by(SliceBatch.slice_id.desc()).limit(1)))
        found = (await session.scalars(select(Slice).where(Slice.id == slice_id))).one_or_none()
        if found is None:
            return None
        plan_id = (await session.scalars(select(Window.plan_id).where(Window.id == found.window_id))).one()
        whole = Slice.window_id == found.window_id
        slices = (await session.scalars(select(func.count()).select_from(Slice).where(whole))).one()
        begun = (
            await session.scalars(
                select(func.count()).select_from(Slice).where(whole, Slice.status != SliceStatus.READY)
            )
        ).one()
    try:
        picture = await PlanArtifact(storage, plan_id).picture()
    except FileNotFoundError:
        return None
    left, right = picture.reach[begun - 1] if begun else (0.0, 0.0)
    return Drawing(picture, left, right, slices, begun)
