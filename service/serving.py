"""Who serves each model, how fast of late, and what it still has to do."""

import asyncio
import math
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial

from redis.exceptions import RedisError
from sqlalchemy import case, func, select

from service.db.sessions import Database
from service.db.tables import Batch, BatchStatus, DrainedWorker, Slice, SliceBatch, SliceStatus
from service.queue.history import NO_PACE, History, Pace
from service.queue.progress import Heartbeat


@dataclass(frozen=True, slots=True)
class Left:
    """What is planned of a batch and not done, in seconds by the cost model; `leased_s`: what engines have of it."""

    expires_at: int
    seq: int
    work_s: float
    leased_s: float


@dataclass(frozen=True, slots=True)
class Serving:
    """Of one model. `alive`: its workers, those that drain among them."""

    alive: int = 0
    draining: int = 0
    pace: Pace = NO_PACE
    left: tuple[Left, ...] = ()


async def serving_by_model(database: Database, heartbeat: Heartbeat, history: History) -> dict[str, Serving]:
    """Of every model that has workers; empty without Redis, which alone knows them."""
    try:
        alive = await heartbeat.alive()
        paces = await history.model_paces()
    except (RedisError, OSError):
        return {}
    async with database.read() as session:
        drained = set(await session.scalars(select(DrainedWorker.name)))
        lefts = (await session.execute(_LEFT)).all() if alive else []
    workers = Counter(state["model"] for state in alive)
    draining = Counter(state["model"] for state in alive if state.get("name") in drained)
    by_model: dict[str, list[Left]] = {}
    for model, expires_at, seq, compute_s, memory_s, planned, left, leased in lefts:
        each_s = max(compute_s, memory_s) / planned
        work = (each_s * float(left), each_s * float(leased))  # PostgreSQL's sums are Decimal
        by_model.setdefault(model or "", []).append(Left(expires_at, seq, *work))
    return {
        model: Serving(count, draining[model], paces.get(model, NO_PACE), tuple(by_model.get(model, ())))
        for model, count in workers.items()
    }


class Outlook:
    """`serving_by_model`, looked up once in a while however many ask: it reads all slices that are not done."""

    def __init__(self, database: Database, heartbeat: Heartbeat, history: History, every_s: float) -> None:
        self._look = partial(serving_by_model, database, heartbeat, history)
        self._every_s = every_s
        self._lock = asyncio.Lock()
        self._found: dict[str, Serving] = {}
        self._looked_at = -math.inf

    async def serving(self) -> dict[str, Serving]:
        async with self._lock:
            if time.monotonic() - self._looked_at >= self._every_s:
                self._found, self._looked_at = await self._look(), time.monotonic()
            return self._found


_PLAN = (Batch.planned_compute_s, Batch.planned_memory_s, Batch.planned)
_LEASED = func.sum(case((Slice.status == SliceStatus.LEASED, SliceBatch.total), else_=0))
_LEFT = (
    select(Batch.model, Batch.expires_at, Batch.seq, *_PLAN, func.sum(SliceBatch.total), _LEASED)
    .join(SliceBatch, SliceBatch.batch_id == Batch.id)
    .join(Slice, Slice.id == SliceBatch.slice_id)
    .where(Batch.status == BatchStatus.IN_PROGRESS, Slice.status != SliceStatus.DONE, Batch.planned > 0)
    .group_by(Batch.model, Batch.id, Batch.expires_at, Batch.seq, *_PLAN)
)
