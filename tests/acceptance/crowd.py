"""Clients of online requests that come all at once, or leave at once."""

import asyncio
import json
from collections import Counter
from typing import Any

import httpx
import openai

from service.demo.prompts import CHAT

FULL = "finished"


class Crowd:
    """Many clients of one service, each with a connection of its own."""

    def __init__(self, url: str, model: str) -> None:
        self._url, self._model = url, model

    def _asked(self, number: int, tokens: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": f"Question {number}?"}]
        return {"model": self._model, "messages": messages, "max_tokens": tokens, "ignore_eos": True, "stream": True}

    async def stream(self, count: int, tokens: int) -> Counter[str]:
        """Read so many streams at once to their ends; return how they ended: FULL, or the error's code."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._url, limits=limits, timeout=300) as client:
            return Counter(await asyncio.gather(*(self._read(client, n, tokens) for n in range(count))))

    async def _read(self, client: httpx.AsyncClient, number: int, tokens: int) -> str:
        last = ""
        async with client.stream("POST", CHAT, json=self._asked(number, tokens)) as answer:
            if answer.status_code != 200:
                return str(json.loads(await answer.aread())["error"]["code"])
            async for line in answer.aiter_lines():
                last = line or last
        if last == "data: [DONE]":
            return FULL
        return str(json.loads(last.removeprefix("data: ")).get("error", {}).get("code", "cut"))

    async def hang_up(self, count: int) -> None:
        """Ask so many times, and leave at once or after the first bytes."""
        host, port = self._url.removeprefix("http://").split(":")

        async def leave(number: int) -> None:
            reader, writer = await asyncio.open_connection(host, int(port))
            body = json.dumps(self._asked(number, 2000)).encode()
            head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            await writer.drain()
            if number % 2:
                await reader.read(100)
            writer.close()

        await asyncio.gather(*(leave(number) for number in range(count)))

    async def choices(self, count: int) -> tuple[int, int]:
        """Return how many choices a whole answer and a stream bring when `count` are asked for."""
        asked: Any = {**self._asked(0, 4), "n": count, "extra_body": {"ignore_eos": True}}
        del asked["ignore_eos"]
        async with openai.AsyncOpenAI(base_url=f"{self._url}/v1", api_key="k") as client:
            create: Any = client.chat.completions.create
            whole = await create(**{**asked, "stream": False})
            stream = await create(**asked)
            return len(whole.choices), len({each.index async for chunk in stream for each in chunk.choices})
