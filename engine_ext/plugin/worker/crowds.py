"""Lets long lists of prompts into the engine a few at a time, and projects take turns in front of it.

SGLang runs each prompt of a list as a request of its own. Tens of thousands at once make each step, and each abort,
take seconds.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

SMALL = 128  # answers of a request that never waits
MOST = 4096  # answers of larger ones that are in the engine at once; one that comes alone may have more


class Crowds:
    """Counts the answers that long lists wait for in the engine."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._inside = 0
        self._waiting: OrderedDict[str, deque[tuple[int, asyncio.Future[None]]]] = OrderedDict()  # by project

    @asynccontextmanager
    async def enter(self, answers: int, project: str) -> AsyncGenerator[None, None]:
        """Wait until so many answers more may be made in the engine, and count them during the block."""
        if answers <= SMALL:
            yield
            return
        if self._waiting or not self._fits(answers):
            mine = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(project, deque()).append((answers, mine))
            try:
                await mine
            except asyncio.CancelledError:
                if not mine.cancelled():  # it was let in just then
                    self._leave(answers)
                raise
        else:
            self._inside += answers
        try:
            yield
        finally:
            self._leave(answers)

    def _fits(self, answers: int) -> bool:
        return not self._inside or self._inside + answers <= self._most

    def _leave(self, answers: int) -> None:
        self._inside -= answers
        while self._waiting:
            project, theirs = next(iter(self._waiting.items()))
            count, first = theirs[0]
            if not first.cancelled() and not self._fits(count):
                return
            theirs.popleft()
            if not theirs:
                del self._waiting[project]
            if first.cancelled():
                continue
            if theirs:
                self._waiting.move_to_end(project)
            self._inside += count
            first.set_result(None)
