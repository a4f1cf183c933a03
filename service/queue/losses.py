"""Remembers online requests with which workers were lost, so that one that kills engines is refused.

Redis holds digests of bodies, and no text. They are forgotten after KEEP_S, and when Redis is emptied.
"""

import asyncio
import math
import time
from collections import deque

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from service.queue import keys

KEEP_S = 600
LEFT_S = 120.0  # an engine that hangs is killed within BATCHWEAVE_STEP_LIMIT_S
LOSSES = 2  # workers; with one, each request on it may have been what killed it
MOST_REFUSED = 1000
MOST_WORKERS, MOST_LEFT = 256, 256  # of which a process remembers who left
LOOK_S = 1.0
log = structlog.get_logger()

# KEYS: workers that were lost with the request, refused ones. ARGV: digest, seconds to keep it, workers that are
# enough, most requests that are refused, worker. Returns whether the request is refused. The time is Redis's own.
_NOTE = """
redis.call('SADD', KEYS[1], ARGV[5])
redis.call('EXPIRE', KEYS[1], ARGV[2])
if redis.call('SCARD', KEYS[1]) < tonumber(ARGV[3]) then return 0 end
redis.call('ZADD', KEYS[2], redis.call('TIME')[1] + ARGV[2], ARGV[1])
redis.call('ZREMRANGEBYRANK', KEYS[2], 0, -ARGV[4] - 1)
redis.call('EXPIRE', KEYS[2], ARGV[2])
return 1
"""

# KEYS: refused ones. Returns the digests of those that are refused now.
_REFUSED = "return redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. redis.call('TIME')[1], '+inf')"


class Losses:
    """Remembers which workers were lost while they ran a request, for all processes of the API.

    A request may run on a worker several times at once, and counts once there.
    """

    def __init__(self, redis: Redis) -> None:
        self._note = redis.register_script(_NOTE)
        self._all_refused = redis.register_script(_REFUSED)
        self._refused: set[str] = set()
        self._looked_at = self._heard_at = -math.inf
        self._left: dict[str, deque[tuple[float, str]]] = {}  # by worker: when clients left, and their digests
        self._unwritten: set[tuple[str, str]] = set()
        self._writing: asyncio.Task[None] | None = None

    def left(self, worker: str, digest: str) -> None:
        """Note that the client of a request left this worker; the engine may yet die of it."""
        if worker not in self._left and len(self._left) >= MOST_WORKERS:
            self._left.pop(next(iter(self._left)))
        self._left.setdefault(worker, deque(maxlen=MOST_LEFT)).append((time.monotonic(), digest))

    def lost(self, worker: str, digest: str) -> None:
        """Note that this worker was lost while it ran the request, or soon after its client had left."""
        since = time.monotonic() - LEFT_S
        before = self._left.pop(worker, ())
        self._unwritten |= {(worker, digest), *((worker, each) for at, each in before if at >= since)}
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())  # nobody waits for Redis, and one connection is enough

    async def close(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.wait({self._writing})

    async def _write(self) -> None:
        try:
            while self._unwritten:
                worker, digest = self._unwritten.pop()
                args = [digest, KEEP_S, LOSSES, MOST_REFUSED, worker]
                if await self._note(keys=[keys.lost(digest), keys.REFUSED], args=args):
                    log.error("workers were lost with an online request, which is refused now", digest=digest)
        except (RedisError, OSError) as error:
            self._unwritten.clear()
            log.warning("the loss of a worker is not remembered", error=repr(error))

    async def refuses(self, digest: str) -> bool:
        """Return whether the request is refused; what other processes noted may take a second to show."""
        now = time.monotonic()
        if now - self._looked_at >= LOOK_S:
            self._looked_at = now
            try:
                found: list[bytes] = await self._all_refused(keys=[keys.REFUSED])
                self._refused, self._heard_at = {each.decode() for each in found}, now
            except (RedisError, OSError) as error:
                log.warning("requests that kill workers are unknown", error=repr(error))
        if now - self._heard_at > KEEP_S:
            self._refused = set()
        return digest in self._refused
