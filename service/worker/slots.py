"""The request slots of an engine without SGLang: some requests run, the others wait and can be withdrawn."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass
class Slots:
    """Lets `at_once` requests run; the others wait, those of a lower rank first, and can be withdrawn."""

    at_once: int
    running: int = 0
    _waiting: dict[str, asyncio.Event] = field(default_factory=dict[str, asyncio.Event])
    # Those that wait, in their order, by rank.
    _queues: dict[int, dict[str, None]] = field(default_factory=dict[int, dict[str, None]])

    @asynccontextmanager
    async def enter(self, rid: str, rank: int = 0) -> AsyncGenerator[bool]:
        """Wait for a slot; yields False for a request that was withdrawn."""
        self._waiting[rid] = event = asyncio.Event()
        queue = self._queues.setdefault(rank, {})
        queue[rid] = None
        self._admit()
        try:
            async with self._admitted(rid, event) as runs:
                yield runs
        finally:
            queue.pop(rid, None)

    @asynccontextmanager
    async def _admitted(self, rid: str, event: asyncio.Event) -> AsyncGenerator[bool]:
        try:
            await event.wait()
        except asyncio.CancelledError:
            if self._waiting.pop(rid, None) is None:
                self._leave()
            raise
        if self._waiting.pop(rid, None) is not None:
            yield False
            return
        try:
            yield True
        finally:
            self._leave()

    async def withdraw(self, rids: Sequence[str], most: int) -> None:
        """Let up to `most` of these requests that wait end, in this order."""
        for rid in [each for each in rids if each in self._waiting][:most]:
            self._waiting[rid].set()
        while any(event.is_set() for event in self._waiting.values()):
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    def abort(self, rid: str) -> None:
        """Let a request end that waits; one that runs does not hear of it."""
        if rid in self._waiting:
            self._waiting[rid].set()

    def _admit(self) -> None:
        for rank in sorted(self._queues):
            queue = self._queues[rank]
            while queue and self.running < self.at_once:
                rid = next(iter(queue))
                del queue[rid]
                if rid in self._waiting:
                    self.running += 1
                    self._waiting.pop(rid).set()

    def _leave(self) -> None:
        self.running -= 1
        self._admit()
