"""The reconciler: makes Redis say what SQL says. It is also how a new plan's slices are announced at all."""

from collections.abc import Callable

import structlog
from redis.asyncio import Redis

from service.db.sessions import Database
from service.metrics.counters import LEASES_EXPIRED
from service.queue.announcements import MOST_ANNOUNCED, Announcements
from service.queue.leases import free_expired
from service.queue.urgency import most_urgent, waiting_models

log = structlog.get_logger()


class Reconciler:
    def __init__(self, database: Database, redis: Redis, lease_s: float, clock: Callable[[], float]) -> None:
        self._database = database
        self._redis = redis
        self._lease_s = lease_s
        self._clock = clock

    async def run_once(self) -> int:
        """Free expired leases and announce the most urgent ready slices; returns how many were new."""
        freed = await free_expired(self._database, self._clock())
        if freed:
            LEASES_EXPIRED.inc(freed)
            log.warning("leases expired", slices=freed)
        added = 0
        for model in await waiting_models(self._database):
            announcements = Announcements(self._redis, model)
            await announcements.take_back(int(self._lease_s * 1000))
            added += await announcements.announce(
                await most_urgent(self._database, model, self._clock(), MOST_ANNOUNCED)
            )
        return added
