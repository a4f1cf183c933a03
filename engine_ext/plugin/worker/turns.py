"""Lets projects take turns in front of what only few may use at once."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class Turns:
    """Lets `most` in at once, and of those who wait a request of the project that had its turn first."""

    def __init__(self, most: int = 1) -> None:
        self._most = most
        self._inside = 0
        self._waiting: OrderedDict[str, deque[tuple[int, asyncio.Future[None]]]] = OrderedDict()  # by project

    @asynccontextmanager
    async def turn(self, of: str, count: int = 1) -> AsyncGenerator[None, None]:
        """Wait for a turn of this project, and have it during the block.

        It counts as `count` of those that may be inside; one that alone is more than that has all of it to itself.
        """
        if self._waiting or not self._fits(count):
            mine = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(of, deque()).append((count, mine))
            try:
                await mine
            except asyncio.CancelledError:
                if not mine.cancelled():  # it was its turn just then
                    self._leave(count)
                raise
        else:
            self._inside += count
        try:
            yield
        finally:
            self._leave(count)

    def _fits(self, count: int) -> bool:
        return not self._inside or self._inside + count <= self._most

    def _leave(self, count: int) -> None:
        self._inside -= count
        while self._waiting:
            of, theirs = next(iter(self._waiting.items()))
            more, first = theirs[0]
            if not first.cancelled() and not self._fits(more):
                return
            theirs.popleft()
            if not theirs:
                del self._waiting[of]
            if first.cancelled():
                continue
            if theirs:
                self._waiting.move_to_end(of)
            self._inside += more
            first.set_result(None)
