"""Decides whose batch is next, by project weight, so that short windows or many batches never starve other projects."""

from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from sqlalchemy import ColumnElement, exists, select

from service.db.sessions import Database
from service.db.tables import Batch
from service.db.tenant_tables import Project
from service.jobs.desk import Desk

MOST_KNOWN = 10_000
MOST_AT_ONCE = 2  # items of one project, in a process that works on three at once


class FairTurns:
    """Start-time fair queueing: a project's virtual time advances by the work done for it divided by its weight.

    A project that was idle starts level with the others: it has not saved up any turns.
    """

    def __init__(self, most_at_once: int = MOST_AT_ONCE) -> None:
        """Allow `most_at_once` items of one project in work, so that a few large ones leave room for other projects."""
        self._most_at_once = most_at_once
        self._times: dict[str, float] = {}
        self._in_work: Counter[str] = Counter()

    def order(self, weights: Mapping[str, float]) -> list[str]:
        """Return the projects that may take a turn, the next one first."""
        floor = min((self._times[each] for each in weights if each in self._times), default=0.0)
        if len(self._times) > MOST_KNOWN:
            self._times = {each: self._times[each] for each in weights if each in self._times}
        for project in weights:
            self._times[project] = max(self._times.get(project, floor), floor)
        free = [project for project in weights if self._in_work[project] < self._most_at_once]
        return sorted(free, key=lambda each: (self._in_work[each], self._times[each]))

    @contextmanager
    def work(self, project: str) -> Generator[None, None, None]:
        """Count an item of the project as in work during the block."""
        self._in_work[project] += 1
        try:
            yield
        finally:
            self._in_work[project] -= 1
            if not self._in_work[project]:
                del self._in_work[project]

    def charge(self, project: str, work: float, weight: float) -> None:
        self._times[project] = self._times.get(project, 0.0) + work / weight


@dataclass(slots=True)
class Taken:
    """A batch in work. The job sets `work` to what the batch took, in requests."""

    batch_id: str
    project_id: str
    work: float = 1.0


class FairDesk:
    """A desk for batches that meet a condition. The next batch is from the project whose turn it is."""

    def __init__(self, job: str, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._desk = Desk(job, clock)
        self._turns = FairTurns()

    @property
    def enough(self) -> int:
        """Return how many batches to fetch so that at least one is free (see Desk.enough)."""
        return self._desk.enough

    @property
    def in_work(self) -> int:
        return self._desk.in_work

    @asynccontextmanager
    async def take(
        self, waits: ColumnElement[bool], of_project: Callable[[str], Awaitable[Iterable[str]]]
    ) -> AsyncGenerator[Taken | None, None]:
        """Yield one batch for which `waits` holds, or None. `of_project` lists a project's batches in their order.

        An exception in the block is logged, and the batch rests.
        """
        weights = await self._waiting(waits)
        for project_id in self._turns.order(weights):
            async with self._desk.take(await of_project(project_id)) as batch_id:
                if batch_id is None:
                    continue
                taken = Taken(batch_id, project_id)
                try:
                    with self._turns.work(project_id):
                        yield taken
                finally:
                    self._turns.charge(project_id, taken.work, weights[project_id])
            return
        yield None

    async def _waiting(self, waits: ColumnElement[bool]) -> dict[str, float]:
        """Return the weights of the projects that have such a batch."""
        some = exists().where(Batch.project_id == Project.id, waits)
        async with self._database.read() as session:
            return dict((await session.execute(select(Project.id, Project.weight).where(some))).tuples().all())
