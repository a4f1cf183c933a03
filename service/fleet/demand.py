"""Reads what a fleet decides by: the work that is left of each model, and how fast its engines are."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import select

from service.db.sessions import Database
from service.db.tables import Batch, BatchStatus, fixed
from service.estimates.paces import FORGET_S
from service.fleet.wanted import LEAST_S, Remainder
from service.metrics.history import NO_PACE, Pace

STEADY_S = 2 * FORGET_S
SLOWEST, FASTEST = 0.1, 10.0  # what is beyond is a fault of the measurement
LEAST_ANSWERS = 20.0  # fewer say too little of how fast an engine is

_UNFINISHED = select(
    *(Batch.model, Batch.expires_at, Batch.prompt_tokens, Batch.total, Batch.planned),
    *(Batch.planned_compute_s, Batch.planned_memory_s, Batch.total - Batch.completed - Batch.failed),
).where(Batch.status == fixed(BatchStatus.IN_PROGRESS), ~Batch.held)


async def work_by_model(database: Database) -> dict[str, list[Remainder]]:
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
    work = defaultdict[str, list[Remainder]](list)
    for model, expires_at, tokens, _, planned, compute_s, memory_s, count in rows:
        if planned:
            work_s = max(compute_s, memory_s) / planned * count
        else:
            work_s = planned_s[model] / planned_tokens[model] * tokens if planned_tokens[model] else LEAST_S
        if count > 0:
            work[model].append(Remainder(float(expires_at), work_s))
    return work


@dataclass(slots=True)
class Speeds:
    """Remembers how much of the cost model's work an engine of each model does in one second, as measured.

    A pace is an average over minutes, so it counts only where the same number of engines has been busy for as long.
    """

    _known: dict[str, float] = field(default_factory=dict[str, float])
    _busy: dict[str, tuple[int, float]] = field(default_factory=dict[str, tuple[int, float]])  # and since when

    def look(self, paces: Mapping[str, Pace], busy: Mapping[str, int], now: float) -> None:
        """Take the paces of all workers of each model. `busy`: how many there are, if all are; `now`: monotonic."""
        for model in {*self._busy, *busy}:
            before, since = self._busy.get(model, (0, now))
            engines = busy.get(model, 0)
            since = since if engines == before else now
            self._busy[model] = (engines, since)
            pace = paces.get(model, NO_PACE)
            if engines and now - since > STEADY_S and pace.work and pace.answers >= LEAST_ANSWERS:
                self._known[model] = min(max(pace.work / engines, SLOWEST), FASTEST)

    def real(self, model: str, work: Sequence[Remainder]) -> tuple[Remainder, ...]:
        """Return the remainders with the seconds that an engine takes in fact, if that is known."""
        speed = self._known.get(model, 1.0)
        return tuple(Remainder(each.due_at, each.work_s / speed) for each in work)
