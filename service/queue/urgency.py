"""Which ready slices come next: those with the least slack, pool by pool, in the order of their plans.

Slack is what is left of a batch's time once its own remaining work is taken off. Inside a pool the plan's order stays,
in which slices that share a prefix stand together. Projects take turns by weight: the slack of one takes no other's
share.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, case, exists, func, select, union_all
from sqlalchemy.ext.asyncio import AsyncSession

from service.db.sessions import Database
from service.db.tables import Batch, BatchStatus, Model, Project, SliceBatch, SliceStatus, fixed

HOUR_S = 3600.0
POOLS_S = (0.25 * HOUR_S, HOUR_S, 4 * HOUR_S, 12 * HOUR_S)  # up to so much slack; the last pool has all the rest
MOST_PROJECTS = 64  # looked at in one round; the next round begins behind them
MOST_BATCHES = 32  # of a project, the most urgent

_RUNS = (Batch.status == fixed(BatchStatus.IN_PROGRESS)) & (Batch.slices_left > fixed(0))
_IS_READY = SliceBatch.status == fixed(SliceStatus.READY)


def urgent_at(left: ColumnElement[Any]) -> ColumnElement[Any]:
    """When so many requests of a batch must begin, on an engine of their own, for it to end in time; unix seconds.

    An expression over the batch's row, by the planner's cost model.
    """
    compute_s, memory_s = Batch.planned_compute_s, Batch.planned_memory_s
    work_s = case((compute_s > memory_s, compute_s), else_=memory_s)
    return Batch.expires_at - work_s * left / case((Batch.planned > 0, Batch.planned), else_=1)


async def waiting_models(database: Database) -> Sequence[str]:
    """Models of which a batch that runs has slices that are not done."""
    async with database.read() as session:
        some = exists().where(Batch.model == Model.name, _RUNS)
        return (await session.scalars(select(Model.name).where(some))).all()


class Turns:
    """Whose slices are announced next; one in a process, for it remembers which projects it looked at."""

    def __init__(self) -> None:
        self._last: dict[str, str] = {}  # by model, the last project of the round before, where not all were looked at

    async def most_urgent(self, database: Database, model: str, now: float, most: int) -> list[int]:
        """Ids of the model's first ready slices."""
        async with database.read() as session:
            weights = await self._projects(session, model)
            ready = {project: await _of_project(session, model, project, now, most) for project in weights}
            leased = await _leased(session, model)
        return list(_woven({project: ids for project, ids in ready.items() if ids}, leased, weights, most))

    async def _projects(self, session: AsyncSession, model: str) -> dict[str, float]:
        """Weights of the projects that have slices that are not done."""
        waits = exists().where(Batch.project_id == Project.id, Batch.model == model, _RUNS)
        after = self._last.get(model, "")
        query = select(Project.id, Project.weight).where(waits).order_by(Project.id).limit(MOST_PROJECTS)
        found = (await session.execute(query.where(Project.id > after))).all()
        if len(found) < MOST_PROJECTS and after:
            found = [*found, *(await session.execute(query.where(Project.id <= after))).all()][:MOST_PROJECTS]
        self._last[model] = found[-1][0] if len(found) == MOST_PROJECTS else ""
        return {project: weight for project, weight in found}


async def _of_project(session: AsyncSession, model: str, project_id: str, now: float, most: int) -> list[int]:
    some = exists().where(SliceBatch.batch_id == Batch.id, _IS_READY)
    batches = (
        select(Batch.id, Batch.urgent_at)
        .where(Batch.model == model, Batch.project_id == project_id, _RUNS, some)
        .order_by(Batch.urgent_at)
        .limit(MOST_BATCHES)
    )
    pools: dict[int, list[str]] = defaultdict(list)
    for batch_id, urgent in await session.execute(batches):
        slack_s = (urgent or 0.0) - now  # it is set with the plan, as slices are
        pools[sum(slack_s > each for each in POOLS_S)].append(batch_id)
    found: dict[int, None] = {}
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
        found |= dict.fromkeys(await session.scalars(ids))
        if len(found) >= most:
            break
    return list(found)[:most]


async def _leased(session: AsyncSession, model: str) -> Counter[str]:
    """How many slices of each project workers have; one that projects share counts for each."""
    is_leased = SliceBatch.status == fixed(SliceStatus.LEASED)
    query = select(Batch.project_id, func.count()).join(SliceBatch, SliceBatch.batch_id == Batch.id)
    found = await session.execute(query.where(is_leased, Batch.model == model).group_by(Batch.project_id))
    return Counter(dict(found.tuples().all()))


def _woven(
    ready: Mapping[str, Sequence[int]], leased: Mapping[str, int], weights: Mapping[str, float], most: int
) -> Iterator[int]:
    """Slices of all projects in one order: the project with the least of its share in the engines is next."""
    has, given, told = Counter(leased), dict.fromkeys(ready, 0), set[int]()
    while len(told) < most and (left := [each for each in ready if given[each] < len(ready[each])]):
        project = min(left, key=lambda each: (has[each] + 1) / weights[each])
        slice_id = ready[project][given[project]]
        given[project] += 1
        has[project] += 1
        if slice_id not in told:
            told.add(slice_id)
            yield slice_id
