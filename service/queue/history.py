"""What the service did over the last day, for those who look: points in Redis, which may be lost."""

import json
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from service.queue import keys
from service.queue.counts import Counts

EVERY_S = 10
KEPT = 24 * 3600 // EVERY_S
KEPT_OF_BATCH = 3000
KEEP_BATCH_S = 30 * 24 * 3600
MOST_SHOWN = 600


class History:
    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def is_due(self) -> bool:
        """True once in a while for one of all processes."""
        return bool(await self._redis.set(keys.HISTORY_TURN, 1, nx=True, px=EVERY_S * 1000 - 500))

    async def note(self, point: dict[str, Any]) -> None:
        await self._append(keys.HISTORY, point, KEPT, 2 * 24 * 3600)

    async def note_batch(self, batch_id: str, at: int, counts: Counts) -> None:
        point = [at, counts.completed, counts.failed, counts.input_tokens, counts.output_tokens]
        await self._append(keys.batch_history(batch_id), point, KEPT_OF_BATCH, KEEP_BATCH_S)

    async def points(self) -> list[Any]:
        return await self._read(keys.HISTORY)

    async def batch_points(self, batch_id: str) -> list[Any]:
        """Each: when, completed, failed, prompt tokens, output tokens."""
        return await self._read(keys.batch_history(batch_id))

    async def _append(self, key: str, point: Any, kept: int, keep_s: int) -> None:
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.rpush(key, json.dumps(point))
        pipeline.ltrim(key, -kept, -1)
        pipeline.expire(key, keep_s)
        await pipeline.execute()

    async def _read(self, key: str) -> list[Any]:
        """Thinned evenly, the newest always there; empty without Redis."""
        try:
            found: Any = await self._redis.lrange(key, 0, -1)  # pyright: ignore[reportGeneralTypeIssues]
        except (RedisError, OSError):
            return []
        step = max(1, -(-len(found) // MOST_SHOWN))
        return [json.loads(each) for each in found[::-1][::step][::-1]]
