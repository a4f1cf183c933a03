"""Live counts of running slices. A worker states absolute counts, so a repeated or lost write corrects itself."""

import json
from collections.abc import Iterable
from dataclasses import fields
from time import monotonic
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy import func, select

from service.db.sessions import Database
from service.db.tables import Slice, SliceBatch, SliceStatus
from service.queue import keys
from service.queue.counts import Counts

KEEP_S = 7 * 24 * 3600


class Progress:
    """`asks_again_s`: how long a Redis that has failed is not asked, so that a page of batches waits for it once."""

    def __init__(self, redis: Redis, asks_again_s: float = 0.0) -> None:
        self._redis = redis
        self._asks_again_s = asks_again_s
        self._away_until = 0.0

    async def state(self, slice_id: int, counts: dict[str, Counts]) -> None:
        pipeline = self._redis.pipeline(transaction=False)
        for batch_id, count in counts.items():
            key = keys.progress(batch_id)
            pipeline.hset(key, str(slice_id), str(count))
            pipeline.expire(key, KEEP_S)
        await pipeline.execute()

    async def forget(self, slice_id: int, batch_ids: Iterable[str]) -> None:
        """The slice is no longer running: SQL knows its counts, or its next run states them."""
        pipeline = self._redis.pipeline(transaction=False)
        for batch_id in batch_ids:
            pipeline.hdel(keys.progress(batch_id), str(slice_id))
        await pipeline.execute()

    async def counts(self, database: Database, batch_id: str) -> Counts:
        """What is answered so far: done slices from SQL, running ones from Redis; without Redis, SQL alone."""
        live = await self._live(batch_id)
        async with database.read() as session:
            done = (
                await session.execute(
                    select(*(func.coalesce(func.sum(getattr(SliceBatch, each.name)), 0) for each in fields(Counts)))
                    .join(Slice, Slice.id == SliceBatch.slice_id)
                    .where(SliceBatch.batch_id == batch_id, Slice.status == SliceStatus.DONE)
                )
            ).one()
            running = await session.scalars(
                select(Slice.id).where(Slice.id.in_(live), Slice.status != SliceStatus.DONE)
            )
            return sum((live[slice_id] for slice_id in running), Counts(*(int(each) for each in done)))

    async def _live(self, batch_id: str) -> dict[int, Counts]:
        if monotonic() < self._away_until:
            return {}
        try:
            stated: Any = await self._redis.hgetall(keys.progress(batch_id))
        except (RedisError, OSError):
            self._away_until = monotonic() + self._asks_again_s
            return {}
        return {int(slice_id): Counts.parse(text.decode()) for slice_id, text in stated.items()}


class Heartbeat:
    """Who is alive, and with what; a worker that is silent for `ttl_s` is gone from the list."""

    def __init__(self, redis: Redis, ttl_s: int = 15) -> None:
        self._redis = redis
        self._ttl_s = ttl_s

    async def beat(self, name: str, state: dict[str, Any]) -> None:
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.sadd(keys.WORKERS, name)
        pipeline.set(keys.worker(name), json.dumps(state), ex=self._ttl_s)
        await pipeline.execute()

    async def alive(self) -> list[dict[str, Any]]:
        names: list[Any] = sorted(await self._redis.smembers(keys.WORKERS))
        values: list[Any] = await self._redis.mget([keys.worker(name.decode()) for name in names]) if names else []
        silent = [name for name, value in zip(names, values, strict=True) if value is None]
        if silent:
            await self._redis.srem(keys.WORKERS, *silent)
        return [json.loads(value) for value in values if value]
