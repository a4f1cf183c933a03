"""Reads a batch's slices in plan order, and the prefix tree of its current planning window, for the batch's page."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select

from service.db.sessions import Database
from service.db.tables import Slice, SliceBatch, SliceStatus, Window, fixed
from service.objects.plan_artifact import PlanArtifact
from service.objects.plan_picture import Box, PlanPicture
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


def holders(slices: list[Stretch]) -> list[tuple[str, int, int]]:
    """Return the workers that run slices now, with how many slices and requests of the batch each has."""
    running = [each for each in slices if each.status == SliceStatus.LEASED and each.owner]
    counts, requests = Counter[str](), Counter[str]()
    for each in running:
        counts[each.owner or ""] += 1
        requests[each.owner or ""] += each.requests
    return [(name, counts[name], requests[name]) for name in sorted(counts)]


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

    def text(self, box: Box, project: str | None) -> str:
        """Return what the requests of this box share, if the project has one of them; None stands for an operator."""
        is_seen = project is None or project in {self.picture.projects[each] for each in box.owners}
        return box.text if is_seen else ""


async def drawing(database: Database, storage: Storage, batch_id: str) -> Drawing | None:
    """Return the drawing of the window that the batch runs in, or of its last one; None if its picture is gone."""
    async with database.read() as session:
        mine = select(SliceBatch.slice_id).where(SliceBatch.batch_id == batch_id)
        wanted = [
            select(mine.where(SliceBatch.status == fixed(status)).order_by(SliceBatch.slice_id).limit(1).subquery())
            for status in (SliceStatus.READY, SliceStatus.LEASED)
        ]
        wanted.append(mine.order_by(SliceBatch.slice_id.desc()).limit(1))
        slice_id = None
        for each in wanted:  # what waits was planned last, and maybe with requests of an older window
            slice_id = slice_id or await session.scalar(each)
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


async def progress_of(database: Database, storage: Storage, batch_id: str) -> dict[str, Any]:
    """Return how far the scan has come in the batch's window, as `drawing` has it; empty without a picture."""
    found = await drawing(database, storage, batch_id)
    if found is None:
        return {}
    return {"left": found.left, "right": found.right, "slices": found.slices, "begun": found.begun}
