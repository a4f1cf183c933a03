"""Chooses the ready slices to announce next: those with the least slack, pool by pool, in the order of their plans.

Slack is the time left until a batch's deadline minus its own remaining work. Each pool keeps the plan's order, in which
slices that share a prefix are next to each other. Projects take turns by weight: an urgent batch of one project takes
no share from another.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, case, exists, func, select, union_all
from sqlalchemy.ext.asyncio import AsyncSession

from engine_ext.plan.pools import POOLS_S
from service.db.sessions import Database
from service.db.tables import Batch, BatchStatus, Model, Slice, SliceBatch, SliceStatus, fixed
from service.db.tenant_tables import Project
from service.endpoints import ADAPTER
from service.queue.announcements import Ready

MOST_PROJECTS = 64  # considered in one round; the next round begins after them
MOST_BATCHES = 32  # the most urgent ones of a project

# Batches that run, of which not all planned slices are done.
HAS_SLICES_LEFT = (Batch.status == fixed(BatchStatus.IN_PROGRESS)) & (Batch.slices_left > fixed(0))
# Nobody runs requests for an adapter that was taken out, and they must not keep others from being announced.
_HAS_ADAPTER = Batch.adapter.is_(None) | exists().where(Model.name == Batch.model + ADAPTER + Batch.adapter)
_IS_KNOWN = _HAS_ADAPTER & Batch.index_id.is_not(None)  # a batch whose index was lost gets a new one first
_IS_READY = SliceBatch.status == fixed(SliceStatus.READY)


def urgent_at(left: ColumnElement[Any]) -> ColumnElement[Any]:
    """Return when the `left` requests of a batch must start, on an engine of their own, to meet its deadline.

    The result is an SQL expression over the batch's row, in unix seconds, by the planner's cost model.
    """
    compute_s, memory_s = Batch.planned_compute_s, Batch.planned_memory_s
    work_s = case((compute_s > memory_s, compute_s), else_=memory_s)
    return Batch.expires_at - work_s * left / case((Batch.planned > 0, Batch.planned), else_=1)


async def pools_of(session: AsyncSession, slice_ids: Sequence[int], now: float) -> dict[int, int]:
    """Return the pool of each slice: that of its most urgent batch; 0 is the most urgent one."""
    mine = select(SliceBatch.slice_id, func.min(Batch.urgent_at)).join(Batch, Batch.id == SliceBatch.batch_id)
    found = await session.execute(mine.where(SliceBatch.slice_id.in_(slice_ids)).group_by(SliceBatch.slice_id))
    return {slice_id: _pool(urgent, now) for slice_id, urgent in found}


def _pool(urgent_at: float | None, now: float) -> int:
    slack_s = (urgent_at or 0.0) - now  # it is set with the plan, as the slices are
    return sum(slack_s > each for each in POOLS_S)


async def waiting_models(database: Database) -> Sequence[str]:
    """Return the models of running batches that have slices left to do."""
    async with database.read() as session:
        some = exists().where(Batch.model == Model.name, HAS_SLICES_LEFT)
        return (await session.scalars(select(Model.name).where(some))).all()


class Turns:
    """Decides which projects' slices are announced next; one per process, as it remembers its last project."""

    def __init__(self) -> None:
        self._last: dict[str, str] = {}  # by model, the last project of the previous round, if it did not reach all

    async def most_urgent(self, database: Database, model: str, now: float, most: int) -> list[Ready]:
        """Return the model's most urgent ready slices."""
        async with database.read() as session:
            weights = await self._projects(session, model)
            pools = {project: await _of_project(session, model, project, now, most) for project in weights}
            leased = await _leased(session, model)
            ready = {project: list(found) for project, found in pools.items() if found}
            chosen = dict(_woven(ready, leased, weights, most))
            adapter = select(func.max(Batch.adapter)).where(
                Batch.id == SliceBatch.batch_id, SliceBatch.slice_id == Slice.id
            )
            columns = select(Slice.id, Slice.count, Slice.window_id, adapter.scalar_subquery())
            about = {row[0]: row[1:] for row in await session.execute(columns.where(Slice.id.in_(chosen)))}
        return [
            Ready(slice_id, *about[slice_id][:2], pools[project][slice_id], project, about[slice_id][2] or "")
            for slice_id, project in chosen.items()
            if slice_id in about
        ]

    async def _projects(self, session: AsyncSession, model: str) -> dict[str, float]:
        """Return the weights of the projects that have slices left to do."""
        waits = exists().where(Batch.project_id == Project.id, Batch.model == model, HAS_SLICES_LEFT)
        after = self._last.get(model, "")
        query = select(Project.id, Project.weight).where(waits).order_by(Project.id).limit(MOST_PROJECTS)
        found = (await session.execute(query.where(Project.id > after))).all()
        if len(found) < MOST_PROJECTS and after:
            found = [*found, *(await session.execute(query.where(Project.id <= after))).all()][:MOST_PROJECTS]
        self._last[model] = found[-1][0] if len(found) == MOST_PROJECTS else ""
        return {project: weight for project, weight in found}


async def _of_project(session: AsyncSession, model: str, project_id: str, now: float, most: int) -> dict[int, int]:
    """Return the pools of the project's most urgent ready slices by their ids, in the order in which to run them."""
    some = exists().where(SliceBatch.batch_id == Batch.id, _IS_READY)
    batches = (
        select(Batch.id, Batch.urgent_at)
        .where(Batch.model == model, Batch.project_id == project_id, HAS_SLICES_LEFT, _IS_KNOWN, some)
        .order_by(Batch.urgent_at)
        .limit(MOST_BATCHES)
    )
    pools: dict[int, list[str]] = defaultdict(list)
    for batch_id, urgent in await session.execute(batches):
        pools[_pool(urgent, now)].append(batch_id)
    found: dict[int, int] = {}
    for pool in sorted(pools):
        firsts = [
            select(SliceBatch.slice_id)
            .where(SliceBatch.batch_id == batch_id, _IS_READY)
            .order_by(SliceBatch.slice_id)
            .limit(most)
            .subquery()
            for batch_id in pools[pool]
        ]
        every = union_all(*(select(each.c.slice_id) for each in firsts)).subquery()
        ids = select(every.c.slice_id).distinct().order_by(every.c.slice_id).limit(most)
        found |= {slice_id: pool for slice_id in await session.scalars(ids) if slice_id not in found}
        if len(found) >= most:
            break
    return dict(itertools.islice(found.items(), most))


async def _leased(session: AsyncSession, model: str) -> Counter[str]:
    """Count the leased slices of each project; a slice that projects share counts for each."""
    is_leased = SliceBatch.status == fixed(SliceStatus.LEASED)
    query = select(Batch.project_id, func.count()).join(SliceBatch, SliceBatch.batch_id == Batch.id)
    found = await session.execute(query.where(is_leased, Batch.model == model).group_by(Batch.project_id))
    return Counter(dict(found.tuples().all()))


def _woven(
    ready: Mapping[str, Sequence[int]], leased: Mapping[str, int], weights: Mapping[str, float], most: int
) -> Iterator[tuple[int, str]]:
    """Merge the slices of all projects: the project with the fewest leased slices for its weight comes next.

    Yields each slice with the project whose turn it is.
    """
    has, given, told = Counter(leased), dict.fromkeys(ready, 0), set[int]()
    while len(told) < most and (left := [each for each in ready if given[each] < len(ready[each])]):
        project = min(left, key=lambda each: (has[each] + 1) / weights[each])
        slice_id = ready[project][given[project]]
        given[project] += 1
        has[project] += 1
        if slice_id not in told:
            told.add(slice_id)
            yield slice_id, project
