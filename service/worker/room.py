"""Knows whether a worker may take another slice: what it holds fills its engine, and fits into memory."""

import math
import time
from collections.abc import Callable, Collection, Iterable

from service.db.sessions import Database
from service.metrics.engine import EngineMetrics
from service.objects.plan_artifact import SLICE_BYTES
from service.queue.announcements import Announcements
from service.queue.urgency import pools_of
from service.worker.sharing import Sharing
from service.worker.slice_run import SliceRun

PEEK_S = 1.0  # between two looks at the next slice while there is no room for it
HORIZON_S = 900.0  # of work in flight that is enough
MOST_BYTES = 256 << 20  # of the lines in flight, whose decoded bodies take some times as much memory


class Room:
    """The room of one worker, whose engine has `requests` in flight at the most."""

    def __init__(
        self,
        requests: int,
        database: Database,
        announcements: Announcements,
        sharing: Sharing,
        metrics: EngineMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._requests = requests
        self._database = database
        self._announcements = announcements
        self._sharing = sharing
        self._metrics = metrics
        self._clock = clock
        self._peeked_at = -math.inf

    async def is_left(self, runs: Collection[SliceRun]) -> bool:
        """Return whether to take a slice beside these: there is little in flight, or the next slice is more urgent.

        In flight are as many requests as the scan needs for its blend, or half of these where they last for long, and
        no more than this worker's share. Only what is as urgent as the next slice counts against it, because the engine
        lets it in before all others. The lines of what counts fit into memory.
        """
        requests, fits = sum(run.remaining for run in runs), _fit(runs)
        lasts = self._metrics.remaining_s > HORIZON_S and 2 * requests >= self._requests
        if fits and requests < self._requests and not lasts and await self._sharing.may_take(runs):
            return True
        if time.monotonic() - self._peeked_at < PEEK_S:
            return False
        self._peeked_at = time.monotonic()
        head = await self._announcements.head()
        if head is None:
            return False
        async with self._database.read() as session:
            pools = await pools_of(session, [head, *(run.lease.slice_id for run in runs)], self._clock())
        urgent = [run for run in runs if pools.get(run.lease.slice_id, 0) <= pools.get(head, 0)]
        before = sum(run.remaining for run in urgent)
        return before < requests and 2 * before < self._requests and _fit(urgent)


def _fit(runs: Iterable[SliceRun]) -> bool:
    """Return whether there is memory for the lines of one more slice beside those of these runs."""
    return sum(run.size for run in runs) <= MOST_BYTES - SLICE_BYTES
