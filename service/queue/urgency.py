"""Chooses the ready slices to announce next: those with the least slack, pool by pool, in the order of their plans.

Slack is the time left until a batch's deadline minus its own remaining work. Each pool keeps the plan's order, in which
slices that share a prefix are next to each other. Projects take turns by weight: an urgent batch of one project takes
no share from another.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Select, case, exists, func, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from engine_ext.plan.pools import POOLS_S
from service.db.sessions import Database
from service.db.tables import Batch, BatchStatus, Model, Slice, SliceBatch, SliceStatus, fixed
from service.db.tenant_tables import Project
from service.endpoints import ADAPTER
from service.queue.announcements import Ready

MOST_PROJECTS = 64  # considered in one round; the next round begins after them
MOST_BATCHES = 32  # the most urgent ones of a project
LEAST_SLICES = 4  # that are read of each of these batches first
LAST = (1 << 63) - 1  # above every id


def _has_slices_left(batch: type[Batch]) -> ColumnElement[bool]:
    """Return whether it runs, and not all of its planned slices are done."""
    return (batch.status == fixed(BatchStatus.IN_PROGRESS)) & (batch.slices_left > fixed(0))


HAS_SLICES_LEFT = _has_slices_left(Batch)


def _is_known(batch: type[Batch]) -> ColumnElement[bool]:
    """Return whether workers can run it: one whose index was lost gets a new one first.

    Nobody runs requests for an adapter that was taken out, and they must not keep others from being announced.
    """
    has_adapter = batch.adapter.is_(None) | exists().where(Model.name == batch.model + ADAPTER + batch.adapter)
    return has_adapter & batch.index_id.is_not(None)


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
            weights, leased = await self._projects(session, model), await _leased(session, model)
            found = await _ready_of(session, model, list(weights), now, LEAST_SLICES)
            chosen = list(_woven({each: list(ready.slices) for each, ready in found.items()}, leased, weights, most))
            taken = Counter(project for _, project in chosen)
            # Those that may take more than what was read of them is the right order of.
            short = [each for each, ready in found.items() if taken[each] >= min(ready.exact, most)]
            if short:
                found |= await _ready_of(session, model, short, now, most)
                chosen = _woven({each: list(ready.slices) for each, ready in found.items()}, leased, weights, most)
        return [found[project].slices[slice_id] for slice_id, project in chosen]

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


@dataclass(frozen=True, slots=True)
class _ReadyOf:
    """The ready slices of a project by their ids, pool by pool, in the order of the plans.

    `exact`: how many of them are certainly the first ones; after these, a batch may have more than were read.
    """

    slices: dict[int, Ready]
    exact: float


async def _ready_of(
    session: AsyncSession, model: str, projects: Sequence[str], now: float, most: int
) -> dict[str, _ReadyOf]:
    """Return the ready slices of these projects: of each of their most urgent batches, at most `most`."""
    read: dict[str, dict[int, Ready]] = defaultdict(dict)
    last: dict[tuple[str, str], list[int]] = defaultdict(list)
    for project, batch_id, urgent, adapter, slice_id, count, window_id in (
        await session.execute(_first_slices(model, projects, most))
    ).all():
        last[project, batch_id].append(slice_id)
        ready = Ready(slice_id, count, window_id, _pool(urgent, now), project, adapter or "")
        before = read[project].get(slice_id)  # of another batch of the project
        if before is None or ready.pool < before.pool:
            read[project][slice_id] = ready
    found: dict[str, _ReadyOf] = {}
    for project, slices in read.items():
        in_order = sorted(slices, key=lambda slice_id: (slices[slice_id].pool, slice_id))
        full = {max(ids) for (of, _), ids in last.items() if of == project and len(ids) == most}
        exact = min((at + 1 for at, slice_id in enumerate(in_order) if slice_id in full), default=math.inf)
        found[project] = _ReadyOf({slice_id: slices[slice_id] for slice_id in in_order}, exact)
    return found


def _first_slices(
    model: str, projects: Sequence[str], most: int
) -> Select[str, str, float | None, str | None, int, int, int]:
    """Select the first ready slices of the most urgent batches of each project, of each batch at most `most`.

    Each bound is that of the last row that is wanted, so that the rows that wait are not read.
    """
    other, ready = aliased(Batch), aliased(SliceBatch)
    last_batch = (
        select(other.urgent_at)
        .where(other.project_id == Project.id, _is_announced(other, model))
        .order_by(other.urgent_at)
        .offset(MOST_BATCHES - 1)
        .limit(1)
        .scalar_subquery()
    )
    is_urgent = (Batch.project_id == Project.id) & (Batch.urgent_at <= func.coalesce(last_batch, 1e300))
    place = func.row_number().over(partition_by=Batch.project_id, order_by=(Batch.urgent_at, Batch.seq))
    columns = (Project.id.label("project"), Batch.id, Batch.urgent_at, Batch.adapter, place.label("place"))
    first = (
        select(*columns).join(Batch, is_urgent & _is_announced(Batch, model)).where(Project.id.in_(projects)).subquery()
    )
    last_slice = (
        select(ready.slice_id)
        .where(ready.batch_id == first.c.id, ready.status == fixed(SliceStatus.READY))
        .order_by(ready.slice_id)
        .offset(most - 1)
        .limit(1)
        .scalar_subquery()
    )
    mine = (SliceBatch.batch_id == first.c.id) & (SliceBatch.status == fixed(SliceStatus.READY))
    is_first = mine & (SliceBatch.slice_id <= func.coalesce(last_slice, LAST))
    return (
        select(first.c.project, first.c.id, first.c.urgent_at, first.c.adapter, Slice.id, Slice.count, Slice.window_id)
        .select_from(first)
        .join(SliceBatch, is_first)
        .join(Slice, Slice.id == SliceBatch.slice_id)
        .where(first.c.place <= MOST_BATCHES)
    )


def _is_announced(batch: type[Batch], model: str) -> ColumnElement[bool]:
    """Return whether it is of the model, and workers can run a slice of it now."""
    ready = aliased(SliceBatch)
    has_ready = exists().where(ready.batch_id == batch.id, ready.status == fixed(SliceStatus.READY))
    return (batch.model == model) & _has_slices_left(batch) & _is_known(batch) & has_ready


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
