"""Clients that stream answers while faults happen, and judge how each stream ends."""

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

CHAT = "/v1/chat/completions"
AT_ONCE = 6
PAUSE_S = 0.05
SILENT_S = 240.0  # longer than any fault lasts
GONE_S = 10.0  # in which a killed process is gone
WHOLE, FAILED, NOT_BEGUN, API_DIED = "whole", "ended by an error event", "not begun", "cut when the API died"


@dataclass
class Streams:
    """Runs AT_ONCE clients that stream answers, in a thread of its own, until it is stopped.

    `api`: returns the process id of the API, which alone may cut a stream, by dying. `is_right`: whether these chunks
    answer what was asked, to the end if the last argument is true, and otherwise up to where they end.
    """

    url: str
    model: str
    api: Callable[[], int | None]
    is_right: Callable[[str, list[Any], bool], bool]
    seed: int
    more: dict[str, Any] = field(default_factory=dict[str, Any])  # fields of each body
    ended: Counter[str] = field(default_factory=Counter[str])
    wrong: list[str] = field(default_factory=list[str])  # streams that ended as none may
    _stopped: threading.Event = field(default_factory=threading.Event)
    _executor: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "streams"))
    _running: "Future[None] | None" = None

    def start(self) -> None:
        self._running = self._executor.submit(lambda: asyncio.run(self._run()))

    def stop(self) -> None:
        """Ask for no more, and wait until all have ended. Raises what the clients have raised."""
        self._stopped.set()
        if self._running is not None:
            self._running.result()
        self._executor.shutdown()

    async def _run(self) -> None:
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=self.url, timeout=SILENT_S, limits=limits) as client:
            await asyncio.gather(*(self._ask(client, random.Random(self.seed + k)) for k in range(AT_ONCE)))

    async def _ask(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        while not self._stopped.is_set():
            await asyncio.sleep(rng.random() * 2 * PAUSE_S)
            content, apis = f"stream {rng.randrange(1 << 40)}", {self.api()}
            messages = [{"role": "user", "content": content}]
            body = {"model": self.model, "messages": messages, "stream": True, **self.more}
            lines = list[str]()
            try:
                async with client.stream("POST", CHAT, json=body) as answer:
                    apis.add(self.api())  # one may have died before the request came, and the next one answered it
                    if answer.status_code != 200:
                        self._note_refusal(answer.status_code, await answer.aread())
                        continue
                    lines = [line async for line in answer.aiter_lines() if line]
            except httpx.ConnectError:  # the API is dead, or starts
                await asyncio.sleep(PAUSE_S)
                continue
            except httpx.TransportError as error:
                if await self._one_is_gone(apis):
                    self.ended[API_DIED] += 1
                else:
                    self.wrong.append(f"{error!r} after {lines}")
                continue
            self._note_end(content, lines)

    def _note_refusal(self, status: int, body: bytes) -> None:
        """Note a request that did not begin: it must have OpenAI's error, and a 503."""
        try:
            error = json.loads(body)["error"]
            is_right, said = status == 503 and bool(error["message"]), f"{NOT_BEGUN}: {error['code']}"
        except (ValueError, LookupError, TypeError) as fault:
            is_right, said = False, repr(fault)
        self._count(is_right, said, f"{status}: {body!r:.300}")

    def _note_end(self, content: str, lines: list[str]) -> None:
        """Note how a stream ended: its last line says whether the answer is whole."""
        *pieces, last = [line.removeprefix("data: ") for line in lines] or [""]
        is_whole = last == "[DONE]"
        try:
            said = WHOLE if is_whole else f"{FAILED}: {json.loads(last)['error']['code']}"
            is_right = self.is_right(content, [json.loads(piece) for piece in pieces], is_whole)
        except (ValueError, LookupError, TypeError) as fault:
            is_right, said = False, repr(fault)
        self._count(is_right, said, f"{len(lines)} lines for {content}, the last one {last!r:.200}")

    def _count(self, is_right: bool, said: str, seen: str) -> None:
        """Count how a request ended, or note what was seen of one that ended as none may."""
        if is_right:
            self.ended[said] += 1
        else:
            self.wrong.append(f"{seen}: {said}")

    async def _one_is_gone(self, pids: set[int | None]) -> bool:
        """Return whether one of these processes has ended, or ends within GONE_S."""
        until = time.monotonic() + GONE_S
        while time.monotonic() < until:
            if any(pid is None or not _lives(pid) for pid in pids) or self.api() not in pids:
                return True
            await asyncio.sleep(0.1)
        return False


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
