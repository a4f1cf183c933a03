"""Remembers for a minute what the database said, for calls that cannot wait for it each time."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import structlog

AGAIN_S = 5.0  # after which the database is asked again, while the last answer still counts
LAST_S = 60.0  # for which an answer counts at most, also if the database is down
MOST = 4096  # answers
log = structlog.get_logger()
Key = TypeVar("Key", bound=str | None)
Value = TypeVar("Value")


class Remembered(Generic[Key, Value]):
    """Remembers what `load` returns by key. What it does not find (None) is not remembered."""

    def __init__(self, load: Callable[[Key], Awaitable[Value | None]]) -> None:
        self._load = load
        self._found: OrderedDict[Key, tuple[Value, float]] = OrderedDict()  # with the time of each; the oldest first
        self._loading: dict[Key, asyncio.Task[Value | None]] = {}

    async def get(self, key: Key) -> Value | None:
        value, since = self._found.get(key, (None, -LAST_S))
        age_s = time.monotonic() - since
        if value is not None and age_s < AGAIN_S:
            return value
        task = self._loading.get(key)
        if task is None:
            task = self._loading[key] = asyncio.create_task(self._again(key))
            task.add_done_callback(lambda done: self._ended(key, done))
        return value if value is not None and age_s < LAST_S else await asyncio.shield(task)

    async def _again(self, key: Key) -> Value | None:
        value = await self._load(key)
        self._found.pop(key, None)
        if value is not None:
            self._found[key] = value, time.monotonic()
            if len(self._found) > MOST:
                self._found.popitem(last=False)
        return value

    def _ended(self, key: Key, task: "asyncio.Task[Value | None]") -> None:
        del self._loading[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("the database was not asked again", error=repr(error))
