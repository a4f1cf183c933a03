"""Measure what relaying streams costs the API: CPU seconds a chunk, and time to the first token, on loopback.

python -m benchmarks.relay [--streams 50] [--chunks 400] [--every-ms 20] [--apart-ms 20]

The API is a process of its own, as `batchweave api` starts it. A worker's real door stands before an engine that sends
ready-made events, one every so often. As many streams go to the door's own port, in turn, to compare. SYNTHETIC: no
engine runs, so the relay is all there is to measure.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from redis.asyncio import Redis

from service.db.migrate import upgrade
from service.db.models import register_model
from service.db.sessions import Database
from service.queue.progress import Heartbeat
from service.queue.trust import address_proof, deployment_token
from service.settings import load_settings
from service.worker.door import Door
from tests.hostile.server import SECRET, Role, redis_server, running

CHAT = "/v1/chat/completions"
CHUNK = {
    "id": "chatcmpl-" + "0" * 32,
    "object": "chat.completion.chunk",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "delta": {"content": " token"}, "logprobs": None, "finish_reason": None}],
}
BODY = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}
EVENT = f"data: {json.dumps(CHUNK)}\n\n".encode()


@dataclass
class Metronome:
    """An engine that sends an event every `every_s` seconds to each of its streams, `chunks` times."""

    chunks: int
    every_s: float

    def refusal(self, slo: str) -> str | None:
        return None

    async def serve(
        self, endpoint: str, body: dict[str, Any], rid: str, slo: str, size: int, project: str, weight: float
    ) -> "Metronome":
        return self

    async def __aiter__(self) -> AsyncIterator[bytes]:
        due = time.perf_counter()
        for _ in range(self.chunks):
            yield EVENT
            due += self.every_s
            await asyncio.sleep(max(0.0, due - time.perf_counter()))

    async def close(self) -> None: ...


async def read(
    session: aiohttp.ClientSession, url: str, headers: dict[str, str], body: dict[str, Any]
) -> tuple[float, int]:
    """Read one stream; return the seconds to its first token, and its tokens."""
    began, first_s, tokens = time.perf_counter(), 0.0, 0
    async with session.post(url, json=body, headers=headers) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: "):
                first_s, tokens = first_s or time.perf_counter() - began, tokens + 1
    return first_s, tokens


async def measure(url: str, headers: dict[str, str], streams: int, apart_s: float) -> tuple[np.ndarray[Any, Any], int]:
    """Read so many streams; return each one's seconds to the first token, and all their tokens.

    They run side by side, and each begins `apart_s` after the one before.
    """
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        tasks: list[asyncio.Task[tuple[float, int]]] = []
        for _ in range(streams):
            tasks.append(asyncio.create_task(read(session, url + CHAT, headers, BODY)))
            await asyncio.sleep(apart_s)
        found = await asyncio.gather(*tasks)
    return np.array([first for first, _ in found]), sum(tokens for _, tokens in found)


async def run(api: Role, folder: Path, database_url: str, redis_url: str, given: argparse.Namespace) -> None:
    variables: dict[str, Any] = {"database_url": database_url, "secret_key": SECRET, "data_dir": folder / "data"}
    settings = load_settings(**variables, model_name="m")
    database, redis = Database(settings.database), Redis.from_url(redis_url)
    await register_model(database, settings, 1000, [CHAT])
    token = deployment_token(settings)
    assert token is not None
    door = Door(Metronome(given.chunks, given.every_ms / 1e3), "m", token, 2**20, lambda: None)
    url = await door.open("127.0.0.1", 0)
    await Heartbeat(redis, 600).beat(
        "w", {"name": "w", "model": "m", "online": url, "online_proof": address_proof(token, "w", "m", url)}
    )
    direct = {"Authorization": f"Bearer {token}", "X-Request-Id": "req_" + "0" * 32}
    for target, headers in ((api.url, {}), (url, direct)):  # what is slow only once
        await measure(target, headers, 4, 0.0)
    firsts: dict[str, list[Any]] = {"relayed": [], "direct": []}
    cpu_s, tokens = 0.0, 0
    for _ in range(given.rounds):
        before = sum(api.process.cpu_times()[:2])
        first, read_tokens = await measure(api.url, {}, given.streams, given.apart_ms / 1e3)
        cpu_s, tokens = cpu_s + sum(api.process.cpu_times()[:2]) - before, tokens + read_tokens
        firsts["relayed"].append(first)
        firsts["direct"].append((await measure(url, direct, given.streams, given.apart_ms / 1e3))[0])
    print(f"relay: {1e6 * cpu_s / tokens:.1f} us of the API's CPU a chunk, {tokens} chunks")
    for name, each in firsts.items():
        ms = 1e3 * np.concatenate(each)
        print(f"TTFT {name}: median {np.median(ms):.1f} ms, P99 {np.quantile(ms, 0.99):.1f} ms")
    await door.close(0)
    await redis.aclose()
    await database.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=50, help="at once (default: 50)")
    parser.add_argument("--chunks", type=int, default=400, help="of a stream (default: 400)")
    parser.add_argument("--every-ms", type=float, default=20.0, help="between two chunks (default: 20)")
    parser.add_argument("--apart-ms", type=float, default=20.0, help="between the starts of streams (default: 20)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: 3)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="batchweave-relay-") as name:
        folder = Path(name)
        database_url = f"sqlite:///{folder / 'test.db'}"
        upgrade(load_settings(database_url=database_url).database)
        with redis_server(folder) as redis_url, running("api", folder, database_url, redis_url) as api:
            asyncio.run(run(api, folder, database_url, redis_url, given))


if __name__ == "__main__":
    main()
