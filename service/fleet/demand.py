"""Reads what a fleet decides by: the work that is left of each model, and how fast its engines are."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import select

from service.db.sessions import Database
from service.db.tables import Batch, BatchStatus, fixed
from service.estimates.paces import FORGET_S
from service.fleet.wanted import LEAST_S, Job
from service.metrics.history import NO_PACE, Pace

STEADY_S = 2 * FORGET_S
LEAST_ANSWERS = 20.0  # fewer say too little of how fast an engine is

_UNFINISHED = select(
    *(Batch.model, Batch.expires_at, Batch.prompt_tokens, Batch.total, Batch.planned),
    *(Batch.planned_compute_s, Batch.planned_memory_s, Batch.total - Batch.completed - Batch.failed),
).where(Batch.status == fixed(BatchStatus.IN_PROGRESS), ~Batch.held)


async def jobs_by_model(database: Database) -> dict[str, list[Job]]:
    """Return what is left of each model's batches, in seconds of one engine by the planner's cost model.

    A batch that waits for its plan counts by its prompt tokens, like those of its model that are planned.
    """
    async with database.read() as session:
        rows: Sequence[Any] = (await session.execute(_UNFINISHED)).all()
    planned_s, planned_tokens = defaultdict[str, float](float), defaultdict[str, float](float)
    for model, _, tokens, total, planned, compute_s, memory_s, _ in rows:
        if planned:
            planned_s[model] += max(compute_s, memory_s)
            planned_tokens[model] += tokens * planned / max(1, total)
    jobs = defaultdict[str, list[Job]](list)
    for model, expires_at, tokens, _, planned, compute_s, memory_s, left in rows:
        if planned:
            work_s = max(compute_s, memory_s) / planned * left
        else:
            work_s = planned_s[model] / planned_tokens[model] * tokens if planned_tokens[model] else LEAST_S
        if left > 0:
            jobs[model].append(Job(float(expires_at), work_s))
    return jobs


@dataclass(slots=True)
class Speeds:
    """Remembers how much of the cost model's work an engine of each model does in one second, as measured.

    A pace is an average over minutes, so it counts only where the number of engines has been the same for as long.
    """

    _known: dict[str, float] = field(default_factory=dict[str, float])
    _engines: dict[str, tuple[int, float]] = field(default_factory=dict[str, tuple[int, float]])  # and since when

    def look(self, paces: Mapping[str, Pace], alive: Mapping[str, int], now: float) -> None:
        """Take the paces of all workers of each model, of which so many are alive. `now`: monotonic."""
        for model in {*self._engines, *alive}:
            engines = alive.get(model, 0)
            before, since = self._engines.get(model, (0, now))
            if engines != before:
                since = now
            self._engines[model] = (engines, since)
            pace = paces.get(model, NO_PACE)
            if engines and now - since > STEADY_S and pace.work and pace.answers >= LEAST_ANSWERS:
                self._known[model] = pace.work / engines

    def real(self, model: str, jobs: Sequence[Job]) -> tuple[Job, ...]:
        """Return the jobs with the seconds that an engine takes in fact, if that is known."""
        speed = self._known.get(model, 1.0)
        return tuple(Job(job.due_at, job.work_s / speed) for job in jobs)
