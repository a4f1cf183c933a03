"""A harness for online requests: an API, and workers' doors before engines whose answers a test scripts."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai

from engine_ext.plugin.worker.answers import Answer
from service.queue.progress import Heartbeat
from service.queue.trust import address_proof, deployment_token
from service.settings import Settings
from service.worker.door import Door
from tests.integration.harness import Harness
from tests.integration.serving import CHAT
from tests.waiting import LIMIT_S

ADAPTER = "test-model:sql"
MODEL = "test-model"
PIECES = 5


def event(number: int) -> bytes:
    chunk = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": MODEL,
        "choices": [{"index": 0, "delta": {"content": f"{number} "}, "finish_reason": None}],
    }
    return f"data: {json.dumps(chunk)}\n\n".encode()


def asked(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "a private matter"}], **more}


@dataclass
class ScriptedStream:
    """Yields PIECES events, or as many as `stops_after`, where it waits until it is closed."""

    stops_after: int | None
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for number in range(PIECES):
            if number == self.stops_after:
                await asyncio.Event().wait()
            yield event(number)
        yield b"data: [DONE]\n\n"

    async def close(self) -> None:
        self.closed.set()


@dataclass
class ScriptedOnlineEngine:
    """Stands in for an engine that answers online requests, where SGLang cannot be made to stop at a chosen moment."""

    waits: bool = False  # and never begins to answer
    fails: bool = False
    aborts: bool = False
    stops_after: int | None = None
    late: tuple[str, ...] = ()  # the classes that it refuses
    tiers: list[str] = field(default_factory=list[str])
    asked: list[str] = field(default_factory=list[str])  # rids
    began: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    streams: list[ScriptedStream] = field(default_factory=list[ScriptedStream])

    def refusal(self, slo: str) -> str | None:
        return f"{slo} is late" if slo in self.late else None

    async def serve(
        self, endpoint: str, body: dict[str, Any], rid: str, slo: str, size: int, project: str, weight: float
    ) -> Any:
        self.tiers.append(slo)
        self.asked.append(rid)
        self.began.set()
        if self.waits:
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()
        if self.fails:
            raise RuntimeError(f"cannot serve {body}")
        if body.get("stream"):
            self.streams.append(ScriptedStream(self.stops_after))
            return self.streams[-1]
        return Answer(200, json.dumps({"id": rid, "choices": []}).encode(), aborted=self.aborts)


@dataclass
class OnlineHarness:
    """An API that is running, and the doors of workers, which it finds by the heartbeats that this class writes."""

    harness: Harness
    settings: Settings
    url: str
    reason: str | None = None  # why no door takes requests

    @asynccontextmanager
    async def door(self, name: str, engine: ScriptedOnlineEngine, token: str = "") -> AsyncGenerator[Door, None]:
        ours = deployment_token(self.settings)
        assert ours is not None
        door = Door(engine, [MODEL, ADAPTER], token or ours, self.settings.max_line_bytes, lambda: self.reason)
        address = await door.open("127.0.0.1", 0)
        await self.beat(name, address, online_proof=address_proof(door.token, name, MODEL, address))
        try:
            yield door
        finally:
            await door.close(0)

    @staticmethod
    async def lose(door: Door) -> None:
        """Cut the connections of a door, as if its worker had died, and close it."""
        server = door._runner.server  # pyright: ignore[reportPrivateUsage]
        assert server is not None
        for connection in server.connections:
            if connection.transport is not None:
                connection.transport.abort()
        await door.close(0)

    async def beat(self, name: str, url: str, **more: Any) -> None:
        await Heartbeat(self.harness.redis).beat(name, {"name": name, "model": MODEL, "online": url, **more})

    def client(self, **more: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="k", max_retries=0, **more)

    async def post(self, body: Any, path: str = CHAT, **more: Any) -> httpx.Response:
        async with httpx.AsyncClient(base_url=self.url, timeout=LIMIT_S) as client:
            return await client.post(path, **({"content": body} if isinstance(body, bytes) else {"json": body}), **more)

    async def refuses(self) -> bool:
        return (await self.post(asked())).status_code == 503

    async def serves(self) -> bool:
        return (await self.post(asked())).status_code == 200
