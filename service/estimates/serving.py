"""Reports, by model, which workers serve it, how fast they have been recently, and what work is left."""

import asyncio
import math
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

from redis.exceptions import RedisError
from sqlalchemy import func, select

from service.db.drains import drained_workers
from service.db.sessions import Database
from service.db.tables import Batch, BatchStatus, SliceBatch, SliceStatus, fixed
from service.metrics.history import NO_PACE, History, Pace
from service.queue.progress import STALLED_S, Heartbeat


@dataclass(slots=True)
class DeadlineQueue:
    """The batches of a model that are in progress and not held, by deadline.

    `order`: expires_at and seq of each batch; `work_s`: its planned work that is not done yet, in seconds by the cost
    model; `leased_s`: the part of that work that engines hold.
    """

    order: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    work_s: list[float] = field(default_factory=list[float])
    leased_s: list[float] = field(default_factory=list[float])
    _before_s: list[float] = field(default_factory=list[float])

    def before(self, expires_at: int, seq: int) -> tuple[int, float]:
        """Return how many batches have an earlier deadline, and the work in them."""
        if len(self._before_s) != len(self.order) + 1:
            self._before_s = [0.0, *accumulate(self.work_s)]
        place = bisect_left(self.order, (expires_at, seq))
        return place, self._before_s[place]

    def leased_behind_s(self, expires_at: int, seq: int) -> float:
        """Return the work that engines hold of batches with a later deadline."""
        place = bisect_left(self.order, (expires_at, seq + 1))
        return sum(self.leased_s[place:])


@dataclass(frozen=True, slots=True)
class Serving:
    """The workers, pace and queue of one model. `alive`: its live workers, including draining and stalled ones.

    `starting_s`: how long an engine has been starting, the longest if there are several; None if none is.
    `online_share`: the part of the engines' time that online requests have taken recently, 0 to 1.
    """

    alive: int = 0
    draining: int = 0
    stalled: int = 0
    starting_s: float | None = None
    pace: Pace = NO_PACE
    queue: DeadlineQueue = field(default_factory=DeadlineQueue)
    online_share: float = 0.0


async def serving_by_model(database: Database, heartbeat: Heartbeat, history: History) -> dict[str, Serving]:
    """Return how each model that has workers or batches in progress is served.

    Only Redis knows the workers: without it, none counts as alive.
    """
    try:
        (alive, starting), paces = await heartbeat.everyone(), await history.model_paces()
    except (RedisError, OSError):
        alive, starting, paces = [], [], {}
    async with database.read() as session:
        drained = await drained_workers(session)
        leased = dict((await session.execute(_LEASED)).tuples().all())
        rows = (await session.execute(_QUEUE)).all()
    workers = Counter(state["model"] for state in alive)
    draining = Counter(state["model"] for state in alive if state.get("name") in drained)
    stalled = Counter(state["model"] for state in alive if state.get("step_age_s", 0.0) > STALLED_S)
    online_s: dict[str, float] = defaultdict(float)
    for state in alive:
        ranks = len(state.get("engine") or [0])  # the figures of data-parallel ranks are added up
        online_s[state["model"]] += min(1.0, (state.get("online_seconds_per_second") or 0.0) / ranks)
    since: dict[str, float] = {}
    for state in starting:
        since[state["model"]] = max(state["starting_s"], since.get(state["model"], 0.0))
    queues: dict[str, DeadlineQueue] = defaultdict(DeadlineQueue)
    for batch_id, model, expires_at, seq, compute_s, memory_s, planned, left in rows:
        each_s, queue = max(compute_s, memory_s) / max(planned, 1), queues[model or ""]
        queue.order.append((expires_at, seq))
        queue.work_s.append(each_s * left)
        queue.leased_s.append(each_s * float(leased.get(batch_id, 0)))  # PostgreSQL's sums are Decimal
    return {
        model: Serving(
            *(workers[model], draining[model], stalled[model], since.get(model)),
            *(paces.get(model, NO_PACE), queues[model], online_s[model] / max(1, workers[model])),
        )
        for model in {*workers, *since, *queues}
    }


class ServingCache:
    """Caches `serving_by_model`, which reads the rows of all batches in progress, for `every_s` seconds."""

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


_LEASED = (
    select(SliceBatch.batch_id, func.sum(SliceBatch.total))
    .where(SliceBatch.status == fixed(SliceStatus.LEASED))
    .group_by(SliceBatch.batch_id)
)
_QUEUE = (
    select(
        *(Batch.id, Batch.model, Batch.expires_at, Batch.seq),
        *(Batch.planned_compute_s, Batch.planned_memory_s, Batch.planned),
        Batch.planned - Batch.completed - Batch.failed,
    )
    .where(Batch.status == fixed(BatchStatus.IN_PROGRESS), ~Batch.held)
    .order_by(Batch.expires_at, Batch.seq)
)
