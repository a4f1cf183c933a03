"""Finds the requests that are to be planned now, by model and adapter: adapters share no prefix with each other.

Requests that are planned together share more prefixes and balance each other better, so those of a model wait for
others to come, as long as engines have enough to do and no deadline is near.
"""

from typing import Any

from sqlalchemy import exists, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from engine_ext.plan.pools import HOUR_S
from service.db.models import asks_for
from service.db.sessions import Database
from service.db.tables import Batch, BatchStatus, SliceBatch, SliceStatus, fixed
from service.db.tenant_tables import Project
from service.endpoints import ModelName
from service.jobs.fair_window import Span, fill, shared_room
from service.queue.urgency import HAS_SLICES_LEFT
from service.settings import Settings

MOST_BATCHES = 1000  # of a project in one window
URGENT_S = HOUR_S  # requests that expire sooner are planned at once
_IS_INDEXED = (Batch.status == fixed(BatchStatus.IN_PROGRESS)) & Batch.index_id.is_not(None) & ~Batch.held
_UNPLANNED = _IS_INDEXED & (Batch.planned < Batch.total)
_LEFT, _EXPIRES = func.sum(Batch.total - Batch.planned), func.min(Batch.expires_at)


async def due(database: Database, settings: Settings, now: float) -> dict[str, ModelName]:
    """Return the models with requests that are to be planned now by their names, earliest deadline first.

    Models whose requests had better wait for others are left out.
    """
    query = (
        select(Batch.model, Batch.adapter, _LEFT.label("left"), func.min(Batch.in_progress_at), _EXPIRES.label("at"))
        .where(_UNPLANNED)
        .group_by(Batch.model, Batch.adapter)
        .order_by(_EXPIRES)
    )
    found: dict[str, ModelName] = {}
    async with database.read() as session:
        for model, adapter, left, began_at, expires_at in (await session.execute(query)).all():
            name = ModelName(model or "", adapter)
            waits = left < settings.window_requests and expires_at > now + URGENT_S
            if waits and (began_at or 0) + settings.window_wait_s > now and await _has_ready(session, name):
                continue
            found[str(name)] = name
    return found


async def unplanned(database: Database, settings: Settings, name: ModelName) -> list[Span]:
    """Return the unplanned requests of the model, at most one window of them, earliest deadline first.

    It looks at MOST_BATCHES batches of a project at most; the others come with a later window.
    """
    room = settings.window_requests
    wanted = select(Batch.project_id, _LEFT, Project.weight).join(Project, Project.id == Batch.project_id)
    mine = _UNPLANNED & asks_for(name)
    of_project, in_order = Batch.project_id, (Batch.expires_at, Batch.seq)
    left = Batch.total - Batch.planned
    before = func.sum(left).over(partition_by=of_project, order_by=in_order, rows=(None, 0)) - left
    place = func.row_number().over(partition_by=of_project, order_by=in_order)
    columns = (Batch.id, Batch.project_id, Batch.index_id, Batch.planned, left.label("left"), Batch.expires_at)
    places = (Batch.seq, before.label("before"), place.label("place"))
    async with database.read() as session:
        asked = (await session.execute(wanted.where(mine).group_by(Batch.project_id, Project.weight))).all()
        weights = {project: weight for project, _, weight in asked}
        shares = shared_room({project: int(count) for project, count, _ in asked}, weights, room)
        first = select(*columns, *places).where(mine).subquery()
        # No project uses more than the largest share; the window's rows are chosen from what is left.
        fits = (first.c.before < max(shares.values(), default=0)) & (first.c.place <= MOST_BATCHES)
        rows = (await session.execute(select(first).where(fits).order_by(first.c.expires_at, first.c.seq))).all()
    return fill([_span(row, weights[row.project_id]) for row in rows], room)


async def _has_ready(session: AsyncSession, name: ModelName) -> bool:
    """Return whether the model has, with this adapter, slices that no engine holds yet."""
    ready = exists().where(SliceBatch.batch_id == Batch.id, SliceBatch.status == fixed(SliceStatus.READY))
    return bool(await session.scalar(select(exists().where(asks_for(name), HAS_SLICES_LEFT, ready))))


def _span(row: Any, weight: float) -> Span:
    return Span(row.id, row.project_id, weight, row.index_id or "", row.planned, row.left, row.expires_at)
