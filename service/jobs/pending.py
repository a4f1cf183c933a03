"""Finds the requests that are to be planned now, by model and adapter: adapters share no prefix with each other.

Requests that are planned together share more prefixes and balance each other better, so those of a model wait for
others to come, as long as engines have enough to do and no deadline is near.
"""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import exists, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from engine_ext.plan.pools import HOUR_S
from service.db.models import asks_for
from service.db.sessions import Database
from service.db.tables import Batch, BatchStatus, SliceBatch, SliceStatus, fixed
from service.db.tenant_tables import Project
from service.endpoints import ModelName
from service.jobs.fair_window import Span, fill
from service.queue.urgency import HAS_SLICES_LEFT
from service.settings import Settings

MOST_BATCHES = 1000  # of a project in one window
URGENT_S = HOUR_S  # requests that expire sooner are planned at once


async def pending(database: Database, settings: Settings, now: float) -> dict[str, list[Span]]:
    """Return the unplanned requests by the name of their model, earliest deadline first, at most one window of each.

    It looks at MOST_BATCHES batches of a project at most; the others come with a later window. Models whose requests
    had better wait are left out.
    """
    async with database.read() as session:
        rows = await _unplanned(session)
        names = {ModelName(row.model, row.adapter) for row in rows}
        supplied = {name for name in names if await _has_ready(session, name)}
    waiting: dict[ModelName, list[Any]] = {}
    for row in rows:
        waiting.setdefault(ModelName(row.model, row.adapter), []).append(row)
    return {
        str(name): fill([_span(row) for row in found], settings.window_requests)
        for name, found in waiting.items()
        if name not in supplied or _is_due(found, settings, now)
    }


async def _unplanned(session: AsyncSession) -> Sequence[Any]:
    named = (Batch.model, Batch.adapter)
    place = func.row_number().over(partition_by=(*named, Batch.project_id), order_by=(Batch.expires_at, Batch.seq))
    unplanned = (Batch.status == fixed(BatchStatus.IN_PROGRESS)) & (Batch.planned < Batch.total)
    columns = (Batch.id, *named, Batch.project_id, Batch.index_id, Batch.planned, Batch.expires_at, Batch.seq)
    told = (Batch.in_progress_at, (Batch.total - Batch.planned).label("left"), place.label("place"))
    first = select(*columns, *told).where(unplanned, ~Batch.held, Batch.index_id.is_not(None)).subquery()
    query = (
        select(first, Project.weight)
        .join(Project, Project.id == first.c.project_id)
        .where(first.c.place <= MOST_BATCHES)
        .order_by(first.c.expires_at, first.c.seq)
    )
    return (await session.execute(query)).all()


async def _has_ready(session: AsyncSession, name: ModelName) -> bool:
    """Return whether the model has, with this adapter, slices that no engine holds yet."""
    ready = exists().where(SliceBatch.batch_id == Batch.id, SliceBatch.status == fixed(SliceStatus.READY))
    return bool(await session.scalar(select(exists().where(asks_for(name), HAS_SLICES_LEFT, ready))))


def _is_due(rows: Sequence[Any], settings: Settings, now: float) -> bool:
    """Return whether these requests should be planned though engines have others to run."""
    return (
        sum(row.left for row in rows) >= settings.window_requests
        or min(row.in_progress_at or 0 for row in rows) + settings.window_wait_s <= now
        or min(row.expires_at for row in rows) <= now + URGENT_S
    )


def _span(row: Any) -> Span:
    return Span(row.id, row.project_id, row.weight, row.index_id or "", row.planned, row.left, row.expires_at)
