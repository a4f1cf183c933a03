"""Keeps the service's history of the last week for the dashboard, as points in Redis that may be lost."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from service.queue import keys
from service.queue.counts import Counts

EVERY_S = 10
MOST_SHOWN = 600
KEPT = 24 * 3600 // EVERY_S
LONG_EVERY_S = 120  # of the points that are kept for a week
LONG_KEPT = 7 * 24 * 3600 // LONG_EVERY_S
KEEP_S = 8 * 24 * 3600
MOST_OF_BATCH = 2 * MOST_SHOWN
PACE_POINTS = 7  # a minute
REST_S = 60
KEEP_PACES_S = 60
KEEP_BATCH_S = 30 * 24 * 3600


@dataclass(frozen=True, slots=True)
class Pace:
    """The pace of all workers of a model, weighted towards the last minutes.

    `work`: seconds of work by the planner's cost model that they do in one second; `answers`: how many answers it is
    measured on.
    """

    work: float = 0.0
    answers: float = 0.0


NO_PACE = Pace()


class History:
    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def is_due(self) -> bool:
        """Return whether this process should take the next point: one process does, every EVERY_S seconds."""
        return await self._is_turn(keys.HISTORY_TURN, EVERY_S)

    async def _is_turn(self, key: str, every_s: int) -> bool:
        return bool(await self._redis.set(key, 1, nx=True, px=every_s * 1000 - 500))

    async def note(self, point: dict[str, Any]) -> None:
        """Add a point to the last day, and one of twelve to the last week."""
        lists = [(keys.HISTORY, KEPT)]
        if await self._is_turn(keys.LONG_HISTORY_TURN, LONG_EVERY_S):
            lists.append((keys.LONG_HISTORY, LONG_KEPT))
        pipeline = self._redis.pipeline(transaction=False)
        for key, kept in lists:
            pipeline.rpush(key, json.dumps(point))
            pipeline.ltrim(key, -kept, -1)
            pipeline.expire(key, KEEP_S)
        await pipeline.execute()

    async def note_batch(self, batch_id: str, at: int, counts: Counts) -> None:
        """Add a point, unless nothing has changed; drop every second point when there are too many."""
        key = keys.batch_history(batch_id)
        point = [at, counts.completed, counts.failed, counts.input_tokens, counts.output_tokens]
        last: Any = await self._redis.lindex(key, -1)  # pyright: ignore[reportGeneralTypeIssues]
        before = json.loads(last) if last else point
        if last and before[1:] == point[1:]:
            return
        rested = [[at - EVERY_S, *before[1:]]] if at - before[0] > 2 * EVERY_S else []  # or a line would show progress
        length: Any = await self._redis.rpush(key, *map(json.dumps, [*rested, point]))  # pyright: ignore[reportGeneralTypeIssues]
        pipeline = self._redis.pipeline(transaction=True)
        if length > MOST_OF_BATCH:
            every: Any = await self._redis.lrange(key, 0, -1)  # pyright: ignore[reportGeneralTypeIssues]
            pipeline.delete(key)
            pipeline.rpush(key, *every[::-2][::-1])
        pipeline.expire(key, KEEP_BATCH_S)
        await pipeline.execute()

    async def paces(self, batch_ids: Sequence[str], now: float) -> dict[str, float]:
        """Return answer tokens per second by batch, over its last points; omit batches idle for a minute."""
        pipeline = self._redis.pipeline(transaction=False)
        for batch_id in batch_ids:
            pipeline.lrange(keys.batch_history(batch_id), -PACE_POINTS, -1)
        try:
            found: list[Any] = await pipeline.execute() if batch_ids else []
        except (RedisError, OSError):
            return {}
        paces: dict[str, float] = {}
        for batch_id, raw in zip(batch_ids, found, strict=True):
            points = [json.loads(each) for each in raw]
            if len(points) > 1 and now - points[-1][0] <= REST_S:
                first, last = points[0], points[-1]
                paces[batch_id] = (last[4] - first[4]) / max(1, last[0] - first[0])
        return paces

    async def note_paces(self, paces: Mapping[str, Pace]) -> None:
        said = json.dumps({model: astuple(pace) for model, pace in paces.items()})
        await self._redis.set(keys.PACES, said, ex=KEEP_PACES_S)

    async def model_paces(self) -> dict[str, Pace]:
        """Return the paces of models that had work recently. Raises RedisError, OSError."""
        found: Any = await self._redis.get(keys.PACES)
        return {model: Pace(*pace) for model, pace in json.loads(found).items()} if found else {}

    async def last(self) -> dict[str, Any]:
        """Return the newest point; empty if there is none."""
        try:
            found: Any = await self._redis.lindex(keys.HISTORY, -1)  # pyright: ignore[reportGeneralTypeIssues]
        except (RedisError, OSError):
            return {}
        return json.loads(found) if found else {}

    async def points(self, span_s: int, now: float) -> list[Any]:
        """Return the points of the last `span_s` seconds, of at most seven days."""
        every_s, key = (EVERY_S, keys.HISTORY) if span_s <= KEPT * EVERY_S else (LONG_EVERY_S, keys.LONG_HISTORY)
        points = await self._read(key, -(-span_s // every_s))
        return [point for point in points if point["at"] >= now - span_s]

    async def batch_points(self, batch_id: str) -> list[Any]:
        """Return the batch's points, each: time, completed, failed, prompt tokens, output tokens."""
        return await self._read(keys.batch_history(batch_id))

    async def _read(self, key: str, most: int = 0) -> list[Any]:
        """Return the last `most` points (0: all), thinned evenly but with the newest; empty if Redis is unavailable."""
        try:
            found: Any = await self._redis.lrange(key, -most, -1)  # pyright: ignore[reportGeneralTypeIssues]
        except (RedisError, OSError):
            return []
        step = max(1, -(-len(found) // MOST_SHOWN))
        return [json.loads(each) for each in found[::-1][::step][::-1]]
