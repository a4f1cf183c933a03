"""Remembers online requests with which workers were lost, so that one that kills engines is refused.

Redis holds digests of bodies, and no text. They are forgotten after KEEP_S, and when Redis is emptied.
"""

import time
from typing import Any

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from service.queue import keys

KEEP_S = 600
LOSSES = 2  # with one loss, each request on that worker may have been what killed it
MOST = 1000  # refused ones
LOOK_S = 1.0
log = structlog.get_logger()


class Losses:
    """Counts the workers that were lost while they ran a request, for all processes of the API."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._refused: set[str] = set()
        self._looked_at = -LOOK_S

    async def note(self, digest: str) -> None:
        """Note that a worker was lost while it ran the request with this digest."""
        try:
            counted = self._redis.pipeline(transaction=False)
            counted.incr(keys.lost(digest))
            counted.expire(keys.lost(digest), KEEP_S)
            if (await counted.execute())[0] < LOSSES:
                return
            refused = self._redis.pipeline(transaction=False)
            refused.zadd(keys.REFUSED, {digest: time.time() + KEEP_S})
            refused.zremrangebyrank(keys.REFUSED, 0, -MOST - 1)
            refused.expire(keys.REFUSED, KEEP_S)
            await refused.execute()
            log.error("workers were lost with an online request, which is refused now", digest=digest, losses=LOSSES)
        except (RedisError, OSError) as error:
            log.warning("the loss of a worker is not remembered", error=repr(error))

    async def refuses(self, digest: str) -> bool:
        """Return whether the request with this digest is refused, as was known a second ago."""
        now = time.monotonic()
        if now - self._looked_at >= LOOK_S:
            self._looked_at = now
            try:
                found: list[Any] = await self._redis.zrangebyscore(keys.REFUSED, time.time(), "inf")
                self._refused = {each.decode() for each in found}
            except (RedisError, OSError) as error:
                log.warning("requests that kill workers are unknown", error=repr(error))
        return digest in self._refused
