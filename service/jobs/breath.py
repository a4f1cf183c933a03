"""Lets other tasks run while a job reads a long file."""

import asyncio
import time
from collections.abc import Awaitable, Callable

BREATH_S = 0.02  # how long one file is read before other tasks get their turn
LOOK_S = 2.0  # between two checks whether a batch is still wanted


class Breath:
    """Lets other tasks run while a long file is read. Every few seconds it calls `look`, which raises to stop."""

    def __init__(self, look: Callable[[], Awaitable[None]]) -> None:
        self._look = look
        self._pause_at = time.monotonic() + BREATH_S
        self._look_at = self._pause_at + LOOK_S

    async def draw(self) -> None:
        if time.monotonic() > self._pause_at:
            await asyncio.sleep(0)
            self._pause_at = time.monotonic() + BREATH_S
            if self._pause_at > self._look_at:
                self._look_at = self._pause_at + LOOK_S
                await self._look()
