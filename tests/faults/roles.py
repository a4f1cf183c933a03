"""The service's processes for the fault tests: the real roles, with an engine whose answers are scripted.

What is injected here is what cannot be had from outside: a death at a named place of the code, a store that is full or
slow, a clock that is wrong. The parent says so in small files; nothing of it is in the service.
"""

import asyncio
import contextlib
import json
import os
import signal
import threading
import time
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import uvicorn

from engine_ext.plugin.marks import NO_TERMS, Terms
from engine_ext.plugin.pulse import Beating, Pulses, Watch
from engine_ext.plugin.worker.answers import Answer
from service.api.connections import served
from service.app import create_app
from service.db.models import register_model
from service.db.sessions import Database
from service.jobs.runner import run_jobs
from service.objects.plan_artifact import PlanArtifact
from service.objects.request_output import asked_output
from service.objects.shards import Shard
from service.objects.storage import Storage
from service.queue.announcements import Announcements
from service.queue.connection import open_redis
from service.settings import Settings
from service.worker.loop import Worker
from service.worker.scripted import ABORTED
from service.worker.slots import Slots
from tests.faults.bad_world import worsen

KILLER = "kill the engine"
REFUSED = "refuse this"
CUT_OFF, CUT_OFF_ONCE = "never ends", "ends the second time"
LIMIT, MORE = 1, 100  # tokens that a request asks for, and those that its batch gives it beyond
EVENTS = 20  # of a stream
AT_ONCE = 150  # requests that an engine runs, a quarter of what a worker holds
STEP_LIMIT_S = 5.0  # more than a worker that is stopped for one and a half leases
# Where a process of each role can be told to die, before or after it.
POINTS = {
    "api": ("commit",),
    "planner": ("commit", "plan", "announce", "write"),
    "worker": ("commit", "segment", "forget_taken", "write"),
}


@dataclass(frozen=True, slots=True)
class Config:
    """`folder` is the harness's: logs, and the files by which it injects faults. `dies_at`: a point and how many times
    it is passed before."""

    settings: Settings
    folder: Path
    dies_at: tuple[str, int] | None = None


class LoggedEngine:
    """Answers after a moment, notes each run it begins, and dies of some requests as SGLang's process does.

    While the file `hung` is there it answers nothing and steps no more, until the watch on its pulse ends it.
    """

    def __init__(self, folder: Path, hung: Path) -> None:
        name = f"runs-{os.getpid()}-{time.monotonic_ns()}"
        self._log = os.open(folder / name, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self._hung = hung
        self._in_flight, self._busy_since = 0, None
        self._slots = Slots(AT_ONCE)
        pulses = Pulses()
        self._beating = Beating(pulses.path, 0, time.monotonic())
        self._watch = Watch(pulses, STEP_LIMIT_S, lambda: self._busy_since)
        threading.Thread(target=self._beat, daemon=True).start()
        self._watch.start()

    def _beat(self) -> None:
        while True:
            if not self._hung.exists():
                self._beating.turned(time.monotonic())
                self._beating.stepped(time.monotonic())
            time.sleep(0.1)

    async def run(self, endpoint: str, body: dict[str, Any], rid: str, kind: str, terms: Terms = NO_TERMS) -> Answer:
        with self.working():
            async with self._slots.enter(rid) as runs:
                return await self._run(body) if runs else ABORTED

    async def withdraw(self, rids: Sequence[str], most: int) -> None:
        await self._slots.withdraw(rids, most)

    @contextlib.contextmanager
    def working(self) -> Generator[None, None, None]:
        """A request is in flight until the end of the block."""
        if not self._in_flight:
            self._busy_since = time.monotonic()
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._busy_since = None

    def refusal(self, slo: str) -> str | None:
        return None

    async def serve(
        self, endpoint: str, body: dict[str, Any], rid: str, slo: str, size: int, project: str, weight: float
    ) -> "LoggedStream":
        return LoggedStream(self, body["messages"][-1]["content"])

    async def wait(self, seconds: float) -> None:
        """Wait as long as a step takes, or while the engine hangs."""
        await asyncio.sleep(seconds)
        while self._hung.exists():
            await asyncio.sleep(0.05)

    async def _run(self, body: dict[str, Any]) -> Answer:
        content = body["messages"][-1]["content"]
        os.write(self._log, f"{content}\n".encode())
        await self.wait(0.002 + zlib.crc32(content.encode()) % 20 / 1000)
        if KILLER in content:
            os.kill(os.getpid(), signal.SIGKILL)
        if REFUSED in content:
            error = {"error": {"message": "no", "type": "invalid_request_error", "param": None, "code": "refused"}}
            return Answer(400, json.dumps(error).encode())
        usage = {"prompt_tokens": 10, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
        is_cut = CUT_OFF in content or (CUT_OFF_ONCE in content and body["temperature"] == 0)
        reason = "length" if is_cut or asked_output("/v1/chat/completions", body).most != LIMIT + MORE else "stop"
        answer = {"choices": [{"message": {"content": content}, "finish_reason": reason}], "usage": usage}
        return Answer(200, json.dumps(answer).encode())

    @property
    def step_age_s(self) -> float:
        return self._watch.health.age_s

    async def scheduler_states(self) -> list[dict[str, Any]]:
        return []

    def abort(self, rid: str) -> None:
        """It answers soon anyway."""


@dataclass(frozen=True)
class LoggedStream:
    """Streams EVENTS pieces, each of which says what was asked and its place."""

    engine: LoggedEngine
    content: str

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with self.engine.working():
            for number in range(EVENTS):
                await self.engine.wait(0.02)
                piece = {"choices": [{"index": 0, "delta": {"content": f"{self.content} {number}"}}]}
                yield f"data: {json.dumps(piece)}\n\n".encode()
            yield b"data: [DONE]\n\n"

    async def close(self) -> None: ...


def is_streamed(content: str, chunks: list[Any], to_the_end: bool) -> bool:
    """Whether these are the pieces of a LoggedStream, or its first ones."""
    said = [chunk["choices"][0]["delta"]["content"] for chunk in chunks]
    wanted = [f"{content} {number}" for number in range(EVENTS)]
    return said == (wanted if to_the_end else wanted[: len(said)])


def api(config: Config) -> None:
    _prepare(config)
    uvicorn.Server(served(create_app(config.settings), config.settings)).run()


def planner(config: Config) -> None:
    _prepare(config)
    _run(config, lambda database, storage, redis, stop: run_jobs(database, storage, redis, config.settings, stop))


def worker(config: Config) -> None:
    _prepare(config)

    async def main(database: Database, storage: Storage, redis: Any, stop: asyncio.Event) -> None:
        while True:
            with contextlib.suppress(Exception):  # the database may be the one that was killed
                await register_model(database, config.settings, 8192, ["/v1/chat/completions"])
                break
            await asyncio.sleep(0.1)
        engine = LoggedEngine(config.folder, config.folder / f"hung-{config.settings.worker_name}")
        await Worker(database, storage, redis, engine, config.settings, time.time, 600, online=engine).run(stop)

    _run(config, main)


def _run(config: Config, main: Callable[..., Any]) -> None:
    async def run() -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        database = Database(config.settings.database, config.settings.database_timeout_s)
        redis = open_redis(config.settings.redis)
        await main(database, Storage.open(config.settings.storage), redis, stop)

    while True:  # as a supervisor does when a start fails for a database that is away
        try:
            asyncio.run(run())
            return
        except Exception as error:
            print(f"role failed: {error!r}", flush=True)
            time.sleep(0.2)


def _prepare(config: Config) -> None:
    log = (config.folder / f"log-{config.settings.worker_name}").open("a", buffering=1)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    structlog.configure(
        processors=[structlog.processors.format_exc_info, structlog.processors.JSONRenderer()],
        logger_factory=structlog.PrintLoggerFactory(log),
    )
    real = time.time
    time.time = lambda: real() + _number(config.folder / f"clock-{config.settings.worker_name}")
    put = Storage.put

    async def limited_put(self: Storage, key: str, data: bytes) -> None:
        if (config.folder / "full").exists():
            raise OSError(28, "No space left on device")
        await asyncio.sleep(_number(config.folder / "slow"))
        await put(self, key, data)

    Storage.put = limited_put  # type: ignore[method-assign]
    worsen(config.folder, undoes=config.settings.worker_name != "api")
    if config.dies_at is not None:
        _arm(*config.dies_at, config.folder)


def _number(path: Path) -> float:
    try:
        return float(path.read_text() or 0)
    except OSError:
        return 0.0


def _arm(point: str, passes: int, folder: Path) -> None:
    """Have this process die at the point when it was passed so often, and leave word of it."""
    left = passes

    def pass_by(name: str) -> None:
        nonlocal left
        if name == point:
            left -= 1
            if left < 0:
                (folder / f"died-{name}-{os.getpid()}-{time.monotonic_ns()}").touch()
                os.kill(os.getpid(), signal.SIGKILL)

    def around(owner: Any, method: str, name: str) -> None:
        original = getattr(owner, method)

        async def wrapped(*arguments: Any, **named: Any) -> Any:
            pass_by(f"before {name}")
            result = await original(*arguments, **named)
            pass_by(f"after {name}")
            return result

        setattr(owner, method, wrapped)

    around(Shard, "write", "segment")
    around(PlanArtifact, "write", "plan")
    around(Announcements, "announce", "announce")
    around(Announcements, "forget_taken", "forget_taken")
    around(Storage, "put", "write")
    write = Database.write

    @asynccontextmanager
    async def wrapped_write(self: Database, *given: Any) -> AsyncGenerator[Any, None]:
        async with write(self, *given) as session:
            yield session
            pass_by("before commit")
        pass_by("after commit")

    Database.write = wrapped_write  # type: ignore[method-assign]
