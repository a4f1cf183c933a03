"""Clients that stream answers while faults happen, and judge how each stream ends."""

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from tests.faults.roles import EVENTS

CHAT = "/v1/chat/completions"
AT_ONCE = 6
PAUSE_S = 0.05
SILENT_S = 90.0  # longer than any fault lasts
GONE_S = 10.0  # in which a killed process is gone
WHOLE, FAILED, REFUSED, API_DIED = "whole", "ended by an error event", "refused", "cut when the API died"


@dataclass
class Streams:
    """Streams from AT_ONCE clients, in a thread of its own, until it is stopped.

    `api`: returns the process id of the API, which alone may cut a stream, by dying.
    """

    url: str
    api: Callable[[], int | None]
    seed: int
    ended: Counter[str] = field(default_factory=Counter[str])
    wrong: list[str] = field(default_factory=list[str])  # streams that ended as none may
    _stopped: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="streams", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ask for no more, and wait until all have ended."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    async def _run(self) -> None:
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=self.url, timeout=SILENT_S, limits=limits) as client:
            await asyncio.gather(*(self._ask(client, random.Random(self.seed + k)) for k in range(AT_ONCE)))

    async def _ask(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        while not self._stopped.is_set():
            await asyncio.sleep(rng.random() * 2 * PAUSE_S)
            content, api = f"stream {rng.randrange(1 << 40)}", self.api()
            body = {"model": "test-model", "messages": [{"role": "user", "content": content}], "stream": True}
            lines = list[str]()
            try:
                async with client.stream("POST", CHAT, json=body) as answer:
                    if answer.status_code != 200:
                        self._note_refusal(answer.status_code, await answer.aread())
                        continue
                    lines = [line async for line in answer.aiter_lines() if line]
            except httpx.ConnectError:  # the API is dead, or starts
                await asyncio.sleep(PAUSE_S)
                continue
            except httpx.TransportError as error:
                if await self._is_gone(api):
                    self.ended[API_DIED] += 1
                else:
                    self.wrong.append(f"{error!r} after {lines}")
                continue
            self._note_end(content, lines)

    def _note_refusal(self, status: int, body: bytes) -> None:
        """A request that is not begun gets OpenAI's error, and a status that says whether to try again."""
        error: Any = json.loads(body).get("error", {})
        if status in (500, 503) and error.get("code") and error.get("message"):
            self.ended[f"{REFUSED}: {error['code']}"] += 1
        else:
            self.wrong.append(f"{status}: {body!r:.300}")

    def _note_end(self, content: str, lines: list[str]) -> None:
        """What came is the beginning of the answer, and the last line says whether it is all of it."""
        *pieces, last = [line.removeprefix("data: ") for line in lines] or [""]
        said = [json.loads(piece)["choices"][0]["delta"]["content"] for piece in pieces]
        wanted = [f"{content} {number}" for number in range(EVENTS)]
        if last == "[DONE]" and said == wanted:
            self.ended[WHOLE] += 1
        elif last.startswith('{"error"') and said == wanted[: len(said)]:
            self.ended[f"{FAILED}: {json.loads(last)['error']['code']}"] += 1
        else:
            self.wrong.append(f"{len(lines)} lines for {content}, the last one {last!r:.200}")

    async def _is_gone(self, pid: int | None) -> bool:
        """Return whether the process ends within GONE_S, or has ended."""
        until = time.monotonic() + GONE_S
        while time.monotonic() < until:
            try:
                if pid is None or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE or self.api() != pid:
                    return True
            except psutil.NoSuchProcess:
                return True
            await asyncio.sleep(0.1)
        return False
