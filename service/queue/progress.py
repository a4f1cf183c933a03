"""Live counts and heartbeats in Redis. Workers write absolute counts, so a repeated or lost write corrects itself."""

import json
import os
import threading
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import fields
from time import monotonic
from typing import Any, Literal, NamedTuple

import structlog
from redis import Redis as SyncRedis
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError
from sqlalchemy import null, select

from service.db.sessions import Database
from service.db.tables import Batch, SliceBatch, SliceStatus
from service.queue import keys
from service.queue.counts import Counts

log = structlog.get_logger()
KEEP_S = 7 * 24 * 3600
MOST_EVENTS = 200  # of workers that start and stop; and as many of those that fell silent
REDIS_YOUNG_S = 60
TTL_S = 15.0
SAY_S = 3.0
STALLED_S = 30.0  # a worker counts as stalled after so long without an engine step while requests are in flight


class Progress:
    """Live counts of running slices.

    `asks_again_s`: how long to leave a Redis alone that has failed, so that a page of batches waits for it only once.
    """

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
        """Delete the counts of a slice that no longer runs: SQL has them, or its next run writes them."""
        pipeline = self._redis.pipeline(transaction=False)
        for batch_id in batch_ids:
            pipeline.hdel(keys.progress(batch_id), str(slice_id))
        await pipeline.execute()

    async def counts(self, database: Database, batch_id: str) -> Counts:
        """Return what is answered so far of the batch."""
        return (await self.counts_of(database, [batch_id])).get(batch_id, Counts())

    async def counts_of(self, database: Database, batch_ids: Sequence[str]) -> dict[str, Counts]:
        """Return what is answered so far: done slices from the batches' rows, running ones from Redis if it answers.

        One statement reads both which slices are done and their counts, so that none is missing or counted twice.
        """
        live = await self._live(batch_ids)
        slices = SliceBatch.slice_id.in_({slice_id for _, slice_id in live})
        runs = slices & (SliceBatch.batch_id == Batch.id) & (SliceBatch.status != SliceStatus.DONE)
        columns = [getattr(Batch, each.name) for each in fields(Counts)]
        query = select(Batch.id, SliceBatch.slice_id if live else null(), *columns).where(Batch.id.in_(batch_ids))
        if live:
            query = query.outerjoin(SliceBatch, runs)
        async with database.read() as session:
            rows: Sequence[Any] = (await session.execute(query)).all()
        found: dict[str, Counts] = {}
        for batch_id, slice_id, *counts in rows:
            more = Counts() if slice_id is None else live.get((batch_id, slice_id), Counts())
            found[batch_id] = found.get(batch_id, Counts(*counts)) + more
        return found

    async def _live(self, batch_ids: Sequence[str]) -> dict[tuple[str, int], Counts]:
        """Return what Redis says of the running slices, by batch and slice."""
        if not batch_ids or monotonic() < self._away_until:
            return {}
        pipeline = self._redis.pipeline(transaction=False)
        for batch_id in batch_ids:
            pipeline.hgetall(keys.progress(batch_id))
        try:
            stated: list[dict[bytes, bytes]] = await pipeline.execute()
        except (RedisError, OSError):
            self._away_until = monotonic() + self._asks_again_s
            return {}
        return {
            (batch_id, int(slice_id)): Counts.parse(text.decode())
            for batch_id, slices in zip(batch_ids, stated, strict=True)
            for slice_id, text in slices.items()
        }


class Event(NamedTuple):
    """What happened to a worker, and when.

    `start`: its first heartbeat; `stop`: its clean end; `death`: the first look that missed it; `back`: its next
    heartbeat after that. A worker that dies and starts again before a look misses it has two starts. `exit`: an end
    that `batchweave up` saw, of a worker or another part, with how and its last words.
    """

    at: int
    kind: Literal["start", "stop", "death", "back", "exit"]
    name: str
    words: str = ""


class Heartbeat:
    """Tracks which workers are alive and their state; a worker that is silent for `ttl_s` leaves the list."""

    def __init__(self, redis: Redis, ttl_s: float = TTL_S) -> None:
        self._redis = redis
        self._ttl_s = ttl_s
        self._begun = set[str]()  # workers whose start this process has noted

    async def beat(self, name: str, state: dict[str, Any]) -> None:
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.set(keys.worker(name), json.dumps(state), px=int(self._ttl_s * 1000))
        pipeline.sadd(keys.WORKERS, name)  # after the state, or it would look dead
        _, is_new = await pipeline.execute()
        if name not in self._begun:
            await self._note("start", name)
            self._begun.add(name)
        elif is_new:
            await self._note("back", name)

    async def leave(self, name: str) -> None:
        """Take a worker that stops from the list at once."""
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.srem(keys.WORKERS, name)  # before the state, or it would look dead
        pipeline.delete(keys.worker(name))
        await pipeline.execute()
        if name in self._begun:
            self._begun.remove(name)
            await self._note("stop", name)

    async def beating(self, names: Collection[str]) -> set[str]:
        """Return those of these workers that are alive."""
        asked = list(names)
        values: list[Any] = await self._redis.mget([keys.worker(name) for name in asked]) if asked else []
        return {name for name, value in zip(asked, values, strict=True) if value}

    async def _forget(self, name: str) -> None:
        """Take a silent worker from the list, and note its death once, by the first look that finds it silent."""
        try:
            about = await self._redis.info("server")
        except ResponseError:  # some hosted servers do not say
            about = {}
        if about.get("uptime_in_seconds", REDIS_YOUNG_S) < REDIS_YOUNG_S:
            return  # what beat while Redis was away has yet to come back
        if await self._redis.srem(keys.WORKERS, name):
            await self._note("death", name)
            await self._redis.incr(keys.DEATHS)

    async def _note(self, kind: str, name: str) -> None:
        at, _ = await self._redis.time()
        key = keys.WORKER_DEATHS if kind == "death" else keys.WORKER_EVENTS  # many starts must not push out a death
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.rpush(key, json.dumps([at, kind, name]))
        pipeline.ltrim(key, -MOST_EVENTS, -1)
        await pipeline.execute()

    async def deaths(self) -> int:
        """Return how many workers and parts have died since Redis was empty."""
        return int(await self._redis.get(keys.DEATHS) or 0)

    async def events(self) -> list[Event]:
        """Return what happened to workers, the newest last."""
        pipeline = self._redis.pipeline(transaction=False)
        for key in (keys.WORKER_EVENTS, keys.WORKER_DEATHS):
            pipeline.lrange(key, 0, -1)
        found: list[list[bytes]] = await pipeline.execute()
        return sorted((Event(*json.loads(each)) for every in found for each in every), key=lambda event: event.at)

    async def alive(self) -> list[dict[str, Any]]:
        return (await self.everyone())[0]

    async def everyone(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the states of live workers, and of workers whose engine is starting (`Starting`)."""
        names: list[Any] = sorted(await self._redis.smembers(keys.WORKERS))
        asked = [each(name.decode()) for each in (keys.worker, keys.starting) for name in names]
        values: list[Any] = await self._redis.mget(asked) if asked else []
        alive, starting = values[: len(names)], values[len(names) :]
        silent = [name for name, *both in zip(names, alive, starting, strict=True) if not any(both)]
        for name in silent:
            await self._forget(name.decode())
        begins = [json.loads(later) for now, later in zip(alive, starting, strict=True) if later and not now]
        return [json.loads(value) for value in alive if value], begins


def note_exit(redis: SyncRedis, name: str, words: str, ago_s: float, is_worker: bool) -> None:
    """Note that a part ended by itself `ago_s` seconds ago, and how. A worker leaves the list at once."""
    now, _ = redis.time()
    pipeline = redis.pipeline(transaction=False)
    pipeline.rpush(keys.WORKER_DEATHS, json.dumps([int(now - ago_s), "exit", name, words]))
    pipeline.ltrim(keys.WORKER_DEATHS, -MOST_EVENTS, -1)
    if is_worker:
        pipeline.srem(keys.WORKERS, name)  # before the state, or it would look dead
        pipeline.delete(keys.worker(name), keys.starting(name))
    found: list[int] = pipeline.execute()
    if not is_worker or found[2]:  # else it fell silent before, and that was counted
        redis.incr(keys.DEATHS)


class Starting:
    """Reports from a thread that a worker's engine is starting, which takes minutes and blocks the event loop."""

    def __init__(self, redis_url: str, name: str, state: dict[str, Any]) -> None:
        self._redis = SyncRedis.from_url(redis_url, socket_connect_timeout=SAY_S, socket_timeout=SAY_S)
        self._name, self._state, self._since = name, state, monotonic()
        self.stage = "starts up"  # what it does now, in words
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="starting", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def say(self, stage: str) -> None:
        log.info("starting", stage=stage)
        self.stage = stage

    def end(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.is_set():
            about = {
                "name": self._name,
                "pid": os.getpid(),
                "stage": self.stage,
                "starting_s": round(monotonic() - self._since),
            }
            said = json.dumps({**self._state, **about})
            with suppress(RedisError, OSError):
                self._redis.set(keys.starting(self._name), said, px=int(5 * SAY_S * 1000))
                self._redis.sadd(keys.WORKERS, self._name)
            self._ended.wait(SAY_S)
        with suppress(RedisError, OSError):
            if not self._redis.exists(keys.worker(self._name)):  # or its next look would take it for dead
                self._redis.srem(keys.WORKERS, self._name)
            self._redis.delete(keys.starting(self._name))
            self._redis.close()
