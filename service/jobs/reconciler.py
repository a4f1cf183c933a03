"""The reconciler: brings Redis in line with SQL. It is also what announces the slices of a new plan."""

from collections.abc import Callable

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from service.db.sessions import Database
from service.metrics.counters import LEASES_EXPIRED
from service.queue.announcements import MOST_ANNOUNCED, Announcements
from service.queue.leases import free_expired, owners_of_expired, shorten_absurd
from service.queue.progress import Heartbeat
from service.queue.urgency import Turns, waiting_models

log = structlog.get_logger()


class Reconciler:
    """Frees expired leases and announces ready slices."""

    def __init__(self, database: Database, redis: Redis, lease_s: float, clock: Callable[[], float]) -> None:
        self._database = database
        self._redis = redis
        self._heartbeat = Heartbeat(redis)
        self._lease_s = lease_s
        self._clock = clock
        self._turns = Turns()

    async def run_once(self) -> int:
        """Free expired leases and announce the most urgent ready slices. Returns how many announcements are new."""
        await self._free()
        added = 0
        for model in await waiting_models(self._database):
            announcements = Announcements(self._redis, model)
            wanted = await self._turns.most_urgent(self._database, model, self._clock(), MOST_ANNOUNCED)
            added += await announcements.announce(wanted)
        return added

    async def _free(self) -> None:
        """Make the slices of workers that no longer renew their leases ready again.

        A worker whose heartbeat is gone too counts as dead, and its death counts against its slices.
        """
        absurd = await shorten_absurd(self._database, self._lease_s)
        if absurd:
            log.error("shortened leases that end far in the future: the database's clock was set back", slices=absurd)
        silent = await owners_of_expired(self._database)
        if not silent:
            return
        try:
            alive = await self._heartbeat.beating(silent)
        except (RedisError, OSError) as error:
            log.warning("cannot read heartbeats from Redis: no worker counts as dead", error=repr(error))
            alive = silent
        for owners, dead in ((silent - alive, True), (silent & alive, False)):
            freed = await free_expired(self._database, owners, dead)
            if freed:
                LEASES_EXPIRED.inc(freed)
                log.warning("leases expired", slices=freed, workers=sorted(owners)[:16], dead=dead)
