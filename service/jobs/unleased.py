"""Takes back slices that no worker ever leased, to plan their requests again with those that came since."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import structlog
from sqlalchemy import delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from service.db.deletions import forget_texts_of
from service.db.models import asks_for
from service.db.moves import rows_changed
from service.db.sessions import Database
from service.db.tables import Batch, Slice, SliceBatch, SliceStatus, Window, fixed
from service.db.tenant_tables import Project
from service.endpoints import ModelName
from service.jobs.fair_window import Span
from service.objects.plan_artifact import PlanArtifact
from service.objects.storage import Storage
from service.queue.urgency import HAS_SLICES_LEFT

MOST_NAMED = 5000  # slices in one statement
MOST_BATCHES = 500  # whose rows one commit may hold for their new slices
MOST_PLANS = 200  # that are read for one plan
MOST_AGAIN = 4  # requests that are planned again for each new one, so that no request is planned many times


class Leased(Exception):
    """A worker has leased a slice since, or another planner has taken it back."""


@dataclass(frozen=True, slots=True)
class Unleased:
    """Slices that no worker ever leased, and the numbers of their requests, as spans of their batches."""

    slices: Sequence[int]
    spans: Sequence[Span]


log = structlog.get_logger()

NONE = Unleased((), ())


async def unleased(database: Database, storage: Storage, name: ModelName, most: int) -> Unleased:
    """Return the slices of this model and adapter that no worker ever leased.

    Returns none of them if they have more than `most` requests.
    """
    ready = (
        select(SliceBatch.slice_id)
        .join(Batch, Batch.id == SliceBatch.batch_id)
        .where(asks_for(name), HAS_SLICES_LEFT, SliceBatch.status == fixed(SliceStatus.READY))
        .distinct()
        .limit(most + 1)
    )
    # A slice that was leased may have answers, which belong to it by its id.
    fresh = (Slice.id.in_(ready)) & (Slice.status == SliceStatus.READY) & (Slice.epoch == 0)
    columns = (Slice.id, Slice.first, Slice.count, Window.plan_id)
    async with database.read() as session:
        slices, total = (await session.execute(select(func.count(), func.sum(Slice.count)).where(fresh))).one()
        if (total or 0) > most or slices > MOST_NAMED:
            return NONE
        rows = (await session.execute(select(*columns).join(Window, Window.id == Slice.window_id).where(fresh))).all()
    if len({row.plan_id for row in rows}) > MOST_PLANS:
        return NONE
    requests: dict[str, list[int]] = {}
    for plan_id in dict.fromkeys(row.plan_id for row in rows):
        artifact = PlanArtifact(storage, plan_id)
        try:
            header = await artifact.header()
            order = await artifact.places(0, header.requests)
        except FileNotFoundError:  # a worker that leases them will find out
            log.exception("the plan is gone", plan=plan_id)
            rows = [row for row in rows if row.plan_id != plan_id]
            continue
        for row in rows:
            if row.plan_id == plan_id:
                for batch, request in order[row.first : row.first + row.count].tolist():
                    requests.setdefault(header.batches[batch], []).append(request)
    if len(requests) > MOST_BATCHES:
        return NONE
    spans = await _spans(database, requests)
    if not all(span.index_id for span in spans):  # an index was lost; its batch cannot be planned now
        return NONE
    return Unleased([row.id for row in rows], spans)


def with_again(wanted: Sequence[Span], before: Sequence[Span]) -> list[Span]:
    """Return the wanted spans with the requests of their batches that are planned again, and then the other batches."""
    left = {span.batch_id: span for span in before}
    merged = [replace(span, again=left.pop(span.batch_id, span).again) for span in wanted]
    return [*merged, *left.values()]


async def hold(session: AsyncSession, slice_ids: Sequence[int], spans: Sequence[Span]) -> None:
    """Lock what the transaction of a plan will change: slices first, as workers do, then batches, each in one order.

    Raises Leased if a worker has leased one of the slices since, or another planner has taken it back.
    """
    mine = Slice.id.in_(slice_ids)
    # A batch that has no share left in a window would not find its texts there; the new plan has them too.
    await forget_texts_of(session, Window.id.in_(select(Slice.window_id).where(mine)))
    locked = select(Slice.id).where(mine, Slice.status == SliceStatus.READY, Slice.epoch == 0).order_by(Slice.id)
    if len((await session.scalars(locked.with_for_update())).all()) != len(slice_ids):
        raise Leased("a slice that was to be planned again has been leased")
    shares = await session.scalars(select(SliceBatch.batch_id).where(SliceBatch.slice_id.in_(slice_ids)).distinct())
    batches = Batch.id.in_({*shares, *(span.batch_id for span in spans)})
    await session.execute(select(Batch.id).where(batches).order_by(Batch.id).with_for_update())


async def take_back(session: AsyncSession, slice_ids: Sequence[int]) -> None:
    """Delete these slices, which the transaction holds, after those that take their place are there.

    SQLite gives the ids of deleted rows again if they were the last ones, and an id that a worker was told of must
    never come to mean another slice.
    """
    if not slice_ids:
        return
    mine = Slice.id.in_(slice_ids)
    shares = await session.scalars(select(SliceBatch.batch_id).where(SliceBatch.slice_id.in_(slice_ids)))
    for batch_id, count in sorted(Counter(shares).items()):
        fewer = {"slices": Batch.slices - count, "slices_left": Batch.slices_left - count}
        await session.execute(update(Batch).where(Batch.id == batch_id).values(fewer))
    await session.execute(delete(SliceBatch).where(SliceBatch.slice_id.in_(slice_ids)))
    if rows_changed(await session.execute(delete(Slice).where(mine))) != len(slice_ids):
        raise Leased("a slice that was to be planned again is gone")


async def _spans(database: Database, requests: dict[str, list[int]]) -> list[Span]:
    """Return a span for each of these batches that still runs."""
    columns = (Batch.id, Batch.project_id, Batch.index_id, Batch.planned, Batch.expires_at, Project.weight)
    wanted = select(*columns).join(Project, Project.id == Batch.project_id)
    found = wanted.where(Batch.id.in_(requests), HAS_SLICES_LEFT).order_by(Batch.expires_at, Batch.seq)
    async with database.read() as session:
        rows = (await session.execute(found)).all()
    return [
        Span(
            *(row.id, row.project_id, row.weight, row.index_id or "", row.planned, 0, row.expires_at),
            again=np.sort(np.array(requests[row.id], dtype=np.int64)),
        )
        for row in rows
    ]
