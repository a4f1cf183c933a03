"""Stands in for an engine that runs some requests at once, each for a given time, and lets the others wait."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class PacedAnswer:
    status_code: int
    body: bytes
    aborted: bool = False


WITHDRAWN = PacedAnswer(200, b'{"choices":[{"finish_reason":"abort"}]}', aborted=True)


@dataclass
class Room:
    """Lets `at_once` requests run; the others wait, and can be withdrawn."""

    at_once: int
    running: int = 0
    _waiting: dict[str, asyncio.Event] = field(default_factory=dict[str, asyncio.Event])

    @asynccontextmanager
    async def enter(self, rid: str) -> AsyncGenerator[bool]:
        """Wait for a place; yields False for a request that was withdrawn."""
        self._waiting[rid] = event = asyncio.Event()
        self._let_in()
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
        for rid in [each for each in rids if each in self._waiting][:most]:
            self._waiting[rid].set()
        while any(event.is_set() for event in self._waiting.values()):
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    def abort(self, rid: str) -> None:
        """End a request that waits; one that runs ends soon anyway."""
        if rid in self._waiting:
            self._waiting[rid].set()

    def _let_in(self) -> None:
        for rid in list(self._waiting)[: self.at_once - self.running]:
            self.running += 1
            self._waiting.pop(rid).set()

    def _leave(self) -> None:
        self.running -= 1
        self._let_in()


@dataclass
class PacedEngine:
    """Answers `at_once` requests at a time, each after `seconds(prompt)`.

    `runs` counts how often each prompt ran; `ends` has the times of the answers, by time.monotonic.
    """

    at_once: int
    seconds: Callable[[str], float]
    runs: Counter[str] = field(default_factory=Counter[str])
    ends: list[float] = field(default_factory=list[float])
    step_age_s: float = 0.0

    def __post_init__(self) -> None:
        self.room = Room(self.at_once)

    async def run(
        self, endpoint: str, body: dict[str, Any], rid: str, kind: str, due: float, lengths: str
    ) -> PacedAnswer:
        content = str(body["messages"][-1]["content"])
        async with self.room.enter(rid) as runs:
            if not runs:
                return WITHDRAWN
            self.runs[content] += 1
            await asyncio.sleep(self.seconds(content))
            self.ends.append(time.monotonic())
        usage = {"prompt_tokens": 10, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
        answer = {"choices": [{"message": {"content": content}}], "usage": usage}
        return PacedAnswer(200, json.dumps(answer).encode())

    async def scheduler_states(self) -> list[dict[str, Any]]:
        return []

    def abort(self, rid: str) -> None:
        self.room.abort(rid)

    async def withdraw(self, rids: Sequence[str], most: int) -> None:
        await self.room.withdraw(rids, most)
