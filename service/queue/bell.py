"""Wakes a job of the planner role as soon as it has work, so that jobs need not poll the database all the time.

A ring is a hint, published over Redis, and may be lost: jobs also poll on their own, seldom while Redis works and often
while it does not answer.
"""

import asyncio
from contextlib import suppress
from enum import StrEnum
from typing import Any

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from service.queue import keys

LISTEN_S = 4.0  # a stop is noticed within this time
SELDOM_S = 30.0
log = structlog.get_logger()


class Job(StrEnum):
    VALIDATOR = "validator"
    PLANNER = "planner"
    PREVIEWER = "previewer"
    RECONCILER = "reconciler"
    FINALIZER = "finalizer"
    EXPIRY = "expiry"
    WEBHOOKS = "webhooks"
    HISTORIAN = "historian"
    SWEEPER = "sweeper"
    LOST_SESSIONS = "lost-sessions"


class Bell:
    """Rings for jobs and waits for rings; one per process. `often_s`: how often jobs poll while it cannot listen."""

    def __init__(self, redis: Redis, often_s: float) -> None:
        self._redis = redis
        self._often_s = often_s
        self._rung = {job: asyncio.Event() for job in Job}
        self._hears = False

    async def ring(self, *jobs: Job) -> None:
        """Wake these jobs in every process that listens."""
        self.wake(*jobs)
        with suppress(RedisError, OSError):  # they poll on their own after a while
            await self._redis.publish(keys.BELL, " ".join(jobs))

    async def wait(self, job: Job, stop: asyncio.Event, seldom_s: float | None) -> None:
        """Wait until the job is rung for or `stop` is set, for at most `seldom_s`, or less while it cannot listen.

        With None only a ring or `stop` ends the wait.
        """
        rung = self._rung[job]
        pause_s = seldom_s if self._hears or seldom_s is None else min(self._often_s, seldom_s)
        waits = [asyncio.create_task(each.wait()) for each in (rung, stop)]
        try:
            await asyncio.wait(waits, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
        rung.clear()

    async def listen(self, stop: asyncio.Event) -> None:
        """Listen for rings of other processes until `stop` is set."""
        while not stop.is_set():
            subscription = self._redis.pubsub(ignore_subscribe_messages=True)
            try:
                await subscription.subscribe(keys.BELL)
                self._hears = True
                self.wake(*Job)  # rings from before the subscription are lost
                while not stop.is_set():
                    message: Any = await subscription.get_message(timeout=LISTEN_S)
                    if message is not None:
                        said = message["data"].decode(errors="replace").split()
                        self.wake(*(job for job in Job if job in said))
            except (RedisError, OSError) as error:
                self._hears = False
                log.warning("cannot subscribe to job notifications; jobs poll often instead", error=repr(error))
                with suppress(TimeoutError):
                    async with asyncio.timeout(LISTEN_S):
                        await stop.wait()
            finally:
                self._hears = False
                with suppress(RedisError, OSError):
                    await subscription.aclose()

    def wake(self, *jobs: Job) -> None:
        """Wake these jobs in this process."""
        for job in jobs:
            self._rung[job].set()
