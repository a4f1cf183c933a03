"""Hands out a job's items one by one: an item is never in work twice at once, and one that fails rests for a while."""

from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager

import structlog

LONGEST_REST_S = 60.0
log = structlog.get_logger()


class Desk:
    """Tracks which items of a job are in work and which rest after a failure."""

    def __init__(self, job: str, clock: Callable[[], float]) -> None:
        self._job = job
        self._clock = clock
        self._busy: set[str] = set()
        self._resting: dict[str, tuple[int, float]] = {}  # failures so far, and the end of the rest

    @property
    def enough(self) -> int:
        """Return how many items to fetch so that at least one is free, if any is."""
        now = self._clock()
        return len(self._busy) + sum(until > now for _, until in self._resting.values()) + 1

    @property
    def in_work(self) -> int:
        return len(self._busy)

    @asynccontextmanager
    async def take(self, keys: Iterable[str]) -> AsyncGenerator[str | None, None]:
        """Yield the first free key, or None. An exception in the block is logged, and the item rests."""
        now = self._clock()
        key = next((k for k in keys if k not in self._busy and self._resting.get(k, (0, 0.0))[1] <= now), None)
        if key is None:
            yield None
            return
        self._busy.add(key)
        try:
            yield key
            self._resting.pop(key, None)
        except Exception:  # the edge of a job: one bad item must not stop the others
            failures = self._resting.get(key, (0, 0.0))[0] + 1
            self._resting[key] = (failures, now + min(2.0 ** min(failures, 10), LONGEST_REST_S))
            log.exception("job failed", job=self._job, item=key, failures=failures)
        finally:
            self._busy.discard(key)
