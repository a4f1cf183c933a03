"""A harness that runs the service's jobs on real parts step by step, and an engine whose faults a test can choose."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from sqlalchemy import select, update

from engine_ext.plugin.marks import NO_TERMS, Terms
from engine_ext.plugin.worker.answers import Answer
from service.db.sessions import Database
from service.db.tables import Batch, BatchStatus, Model, Slice, SliceStatus
from service.demo.prompts import corpus
from service.demo.tiny import ensure_tiny_model
from service.jobs.expiry import Expiry
from service.jobs.finalizer import Finalizer
from service.jobs.planner import Planner
from service.jobs.previewer import Previewer
from service.jobs.reconciler import Reconciler
from service.jobs.sweeper import Sweeper
from service.jobs.validator import Validator
from service.objects.storage import Storage, file_key
from service.queue.leases import free_expired, owners_of_expired
from service.queue.progress import Heartbeat, Progress
from service.settings import Settings
from service.worker import scripted
from service.worker.batch_engine import Engine
from service.worker.loop import Worker
from service.worker.script import Rule, Script
from tests.batches import CHAT, create_batch
from tests.conftest import Clock
from tests.waiting import first_of, until

NOT_RUN = ("batch_expired", "batch_cancelled")


class ScriptedEngine(scripted.ScriptedEngine):
    """The scripted engine that the service ships, which also counts what it is asked and waits for a test."""

    def __init__(
        self, statuses: dict[str, list[int]] | None = None, hold: asyncio.Event | None = None, hold_after: int = 0
    ) -> None:
        """`statuses`: by content, one for each attempt. Requests from the `hold_after`-th on wait for `hold`."""
        given = (statuses or {}).items()
        rules = [Rule(prompt=content, status=status, times=1) for content, each in given for status in each]
        super().__init__(Script(tuple(rules), at_once=4096))
        self.hold, self.hold_after = hold, hold_after
        self.runs = Counter[str]()
        # By content, in the order in which they came.
        self.kinds: dict[str, str] = {}
        # By content: the profile that it came with.
        self.lengths: dict[str, str] = {}
        # By content: what ends its answer early. Answers to those in `loops` say that they were stopped.
        self.terms: dict[str, Terms] = {}
        self.loops = set[str]()

    async def run(self, endpoint: str, body: dict[str, Any], rid: str, kind: str, terms: Terms = NO_TERMS) -> Answer:
        content = body["messages"][-1]["content"]
        self.runs[content] += 1
        self.kinds[content], self.lengths[content], self.terms[content] = kind, terms.lengths, terms
        answer = await super().run(endpoint, body, rid, kind, terms)
        if answer.aborted or answer.status_code != 200:
            return answer
        usage = {"prompt_tokens": 10, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
        return Answer(
            200, json.dumps({**json.loads(answer.body), "usage": usage}).encode(), looped=content in self.loops
        )

    async def pause(self, rule: Rule, seconds: float, aborted: asyncio.Event) -> bool:
        if self.hold is not None and self.runs.total() > self.hold_after:
            await first_of(self.hold, aborted)
        return aborted.is_set() or await super().pause(rule, seconds, aborted)


def line(number: int, **changes: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": f"topic {number % 3}"}, {"role": "user", "content": f"request {number}"}]
    body = {"model": "test-model", "messages": messages}
    return {"custom_id": f"id-{number}", "method": "POST", "url": CHAT, "body": body, **changes}


def jsonl(lines: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


@dataclass
class Harness:
    """The service's jobs on a real database, store and Redis; a test runs each of them when it chooses to."""

    database: Database
    storage: Storage
    redis: Redis
    settings: Settings
    clock: Clock

    @classmethod
    async def build(
        cls, database: Database, storage: Storage, redis: Redis, settings: Settings, clock: Clock, tokenizer: Path
    ) -> "Harness":
        async with database.write() as session:
            session.add(Model(name="test-model", source=str(tokenizer), created_at=0))
        return cls(database, storage, redis, settings, clock)

    async def expire_leases(self) -> int:
        """As if nobody had renewed them, and their workers were silent; returns how many are free again."""
        async with self.database.write() as session:
            await session.execute(update(Slice).where(Slice.status == SliceStatus.LEASED).values(lease_until=1.0))
        return await free_expired(self.database, await owners_of_expired(self.database), dead=True)

    @property
    def progress(self) -> Progress:
        return Progress(self.redis)

    @cached_property
    def finalizer(self) -> Finalizer:
        return Finalizer(self.database, self.storage, self.clock)

    @property
    def validator(self) -> Validator:
        return Validator(self.database, self.storage, self.settings, self.clock, Heartbeat(self.redis))

    @property
    def planner(self) -> Planner:
        return Planner(self.database, self.storage, self.settings, self.clock, self.redis)

    @property
    def previewer(self) -> Previewer:
        return Previewer(self.database, self.storage, self.settings, self.clock)

    @property
    def expiry(self) -> Expiry:
        return Expiry(self.database, self.storage, self.clock)

    @property
    def sweeper(self) -> Sweeper:
        return Sweeper(self.database, self.storage, self.clock)

    @property
    def reconciler(self) -> Reconciler:
        return Reconciler(self.database, self.redis, self.settings.lease_s, self.clock)

    async def submit(self, data: bytes, window_s: int = 86400) -> str:
        return await create_batch(self.database, self.storage, data, self.clock(), window_s)

    async def plan(self) -> None:
        """Everything from a new batch to announced slices."""
        while await self.validator.run_once():
            pass
        while await self.planner.run_once() or await self.previewer.run_once():
            pass
        await self.reconciler.run_once()

    @asynccontextmanager
    async def working(
        self, engine: Engine, name: str = "worker-a", in_flight: int = 1000
    ) -> AsyncGenerator[asyncio.Task[None], None]:
        """A worker in the background, stopped cleanly at the end of the block."""
        settings = self.settings.model_copy(update={"worker_name": name})
        worker = Worker(self.database, self.storage, self.redis, engine, settings, self.clock, in_flight)
        stop = asyncio.Event()
        task = asyncio.create_task(worker.run(stop))
        try:
            yield task
        finally:
            stop.set()
            with suppress(asyncio.CancelledError):  # `kill` was a test's way to end it
                await task

    async def batch(self, batch_id: str) -> Batch:
        async with self.database.read() as session:
            return (await session.scalars(select(Batch).where(Batch.id == batch_id))).one()

    async def until_ended(self, *batch_ids: str) -> list[Batch]:
        async def have_ended() -> bool:
            await self.reconciler.run_once()
            await self.finalizer.run_once()
            found[:] = [await self.batch(batch_id) for batch_id in batch_ids]
            return all(each.status in ("completed", "cancelled", "expired", "failed") for each in found)

        found: list[Batch] = []
        await until(have_ended)
        return found

    async def lines(self, file_id: str | None) -> dict[str, dict[str, Any]]:
        """A result file by custom_id; a custom_id that comes twice fails the test."""
        if file_id is None:
            return {}
        found = [json.loads(each) for each in (await self.storage.read(file_key(file_id))).splitlines()]
        by_id = {each["custom_id"]: each for each in found}
        assert len(by_id) == len(found), "a custom_id has two lines"
        return by_id

    async def results(self, batch: Batch) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
        """Output and error lines; counts and usage of the batch must agree with them, and no line be in both."""
        output, errors = await self.lines(batch.output_file_id), await self.lines(batch.error_file_id)
        assert not set(output) & set(errors)
        not_run = [each for each in errors.values() if (each["error"] or {}).get("code") in NOT_RUN]
        assert (batch.completed, batch.failed) == (len(output), len(errors) - len(not_run))
        bodies = [each["response"]["body"] for each in (*output.values(), *errors.values()) if each["response"]]
        usage = [body["usage"] for body in bodies if "usage" in body]
        spent = [each["not_accepted"] for each in usage if "not_accepted" in each]
        for name, own in (("input_tokens", "prompt_tokens"), ("output_tokens", "completion_tokens")):
            assert getattr(batch, name) == sum(each[own] for each in usage) + sum(each[name] for each in spent)
        cached = [*(each["prompt_tokens_details"]["cached_tokens"] for each in usage)]
        assert batch.cached_tokens == sum(cached) + sum(each["cached_tokens"] for each in spent)
        return output, errors


def demo_tokenizer(folder: Path) -> Path:
    return ensure_tiny_model(folder, corpus())


async def all_slices_done(harness: Harness) -> bool:
    async with harness.database.read() as session:
        return not (await session.scalars(select(Slice).where(Slice.status != SliceStatus.DONE))).all()


async def completed_are(harness: Harness, batch_id: str, wanted: int) -> bool:
    return (await harness.progress.counts(harness.database, batch_id)).completed == wanted


async def set_status(harness: Harness, batch_id: str, status: BatchStatus) -> None:
    """As if the API or a job had just moved the batch."""
    async with harness.database.write() as session:
        await session.execute(update(Batch).where(Batch.id == batch_id).values(status=status))
