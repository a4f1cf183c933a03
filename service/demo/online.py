"""Streams answers at a steady pace, alone and then beside the demo's batches, to show what the batches cost."""

import asyncio
import threading
import time
from dataclasses import dataclass, field
from statistics import mean, median, quantiles

import httpx
import openai
from rich.table import Table

PACE_S = 0.25  # between two requests; they come whether or not earlier ones are answered
TOKENS = 32
ALONE_S = 6.0
WARM_UP = 4  # requests before anything counts


@dataclass
class Streams:
    """What the clients of some streams saw, in seconds: times to the first token, and times between tokens."""

    ttft_s: list[float] = field(default_factory=list[float])
    tbt_s: list[float] = field(default_factory=list[float])
    failed: int = 0


class PacedClient:
    """Sends a streaming request every PACE_S from a thread of its own, until it is stopped."""

    def __init__(self, url: str, model: str) -> None:
        self.seen = Streams()
        self._url, self._model = url, model
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="online", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> Streams:
        """Stop sending, wait for the answers, and return what was seen."""
        self._stopped.set()
        self._thread.join()
        return self.seen

    async def _run(self) -> None:
        tasks = list[asyncio.Task[None]]()
        http = openai.DefaultAsyncHttpxClient(trust_env=False)  # no proxy reaches this machine's loopback
        base = f"{self._url}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="none-needed", max_retries=0, http_client=http) as client:
            while not self._stopped.is_set():
                tasks.append(asyncio.create_task(self._ask(client, len(tasks))))
                await asyncio.sleep(PACE_S)
            await asyncio.gather(*tasks)

    async def _ask(self, client: openai.AsyncOpenAI, number: int) -> None:
        began = last = time.perf_counter()
        question = f"Question {number} at {began}: which of these would you read first, and why?"
        first = True
        try:
            stream = await client.chat.completions.create(
                model=self._model, messages=[{"role": "user", "content": question}], max_tokens=TOKENS, stream=True
            )
            async for chunk in stream:
                if not chunk.choices or not chunk.choices[0].delta.content:
                    continue
                now = time.perf_counter()
                (self.seen.ttft_s if first else self.seen.tbt_s).append(now - (began if first else last))
                first, last = False, now
        except (openai.OpenAIError, httpx.HTTPError):
            self.seen.failed += 1


@dataclass
class Comparison:
    """What streams saw alone, and the client that streams beside the batches."""

    alone: Streams
    beside: PacedClient

    @classmethod
    def begun(cls, url: str, model: str) -> "Comparison":
        """Stream alone for a while, once the engine has answered the first requests, and go on in a thread."""
        _for_a_while(url, model, WARM_UP * PACE_S)
        alone, beside = _for_a_while(url, model, ALONE_S), PacedClient(url, model)
        beside.start()
        return cls(alone, beside)

    def table(self) -> Table:
        """Stop streaming, and compare."""
        shown = Table(title="online requests, as their client saw them")
        for column in ("", "requests", "failed", "TTFT median", "TTFT P99", "TBT mean", "TBT P99"):
            shown.add_column(column, justify="right" if column else "left")
        for name, seen in (("alone", self.alone), ("beside the batches", self.beside.stop())):
            ttft, tbt = seen.ttft_s or [0.0], seen.tbt_s or [0.0]
            times = (median(ttft), _p99(ttft), mean(tbt), _p99(tbt))
            shown.add_row(name, f"{len(seen.ttft_s)}", f"{seen.failed}", *(f"{1000 * each:,.0f} ms" for each in times))
        return shown


def _for_a_while(url: str, model: str, seconds: float) -> Streams:
    client = PacedClient(url, model)
    client.start()
    time.sleep(seconds)
    return client.stop()


def _p99(values: list[float]) -> float:
    return quantiles(values, n=100, method="inclusive")[98] if len(values) > 1 else values[0]
