"""Runs one leased slice: reads its requests, skips those that are answered, runs the rest, keeps every answer."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np
import structlog
from sqlalchemy import select

from service import ids
from service.db.sessions import Database
from service.db.tables import Batch, BatchStatus, SliceBatch, Window
from service.endpoints import BY_PATH
from service.estimates.length_memory import remembered
from service.metrics import tracing
from service.metrics.counters import RETRIES, SEGMENTS, count_answer, timed
from service.objects.plan_artifact import PlanArtifact
from service.objects.request_index import RequestIndex
from service.objects.shards import Answer, Shard, Usage
from service.objects.storage import Storage, file_key
from service.queue.counts import Counts
from service.queue.leases import ALONE_DEATHS_TO_REFUSE, Lease, Trial
from service.requests.body_limits import body_faults
from service.requests.lines import RequestLine
from service.settings import Settings
from service.worker.answer_body import NO_USAGE, error_message, usage_of
from service.worker.feed import Feed

KILLS = "The engine died each time it ran this request, even alone. The other requests continue without it."
FLUSH_BYTES = 4 * 1024 * 1024
log = structlog.get_logger()


class EngineAnswer(Protocol):
    @property
    def status_code(self) -> int: ...
    @property
    def body(self) -> bytes: ...
    @property
    def aborted(self) -> bool: ...


class Engine(Protocol):
    """The interface that a worker needs of an engine; engine_ext.plugin.worker.host.EngineHost implements it."""

    async def run(
        self, endpoint: str, body: dict[str, Any], rid: str, kind: str, due: float, lengths: str
    ) -> EngineAnswer: ...
    def abort(self, rid: str) -> None: ...
    @property
    def step_age_s(self) -> float: ...
    async def scheduler_states(self) -> list[dict[str, Any]]: ...


@dataclass(frozen=True, slots=True)
class Request:
    """A request of the slice, ready to run.

    `place`: its position in the window's plan. `due`: when its batch expires, by time.monotonic.
    `lengths`: the profile of earlier answers to requests like it, or nothing.
    """

    batch_id: str
    number: int
    endpoint: str
    custom_id: str
    body: dict[str, Any]
    place: int
    due: float
    lengths: str
    request_id: str = field(default_factory=lambda: f"req_{secrets.token_hex(16)}")  # in its answer line and in the log


_line_decoder = msgspec.json.Decoder(RequestLine)


def _about(request: Request) -> AbstractContextManager[None]:
    """Bind the request's ids to every log line of the block."""
    return structlog.contextvars.bound_contextvars(
        batch=request.batch_id, custom_id=request.custom_id, request_id=request.request_id
    )


class SliceRun:
    """The run of one slice. Create it with a fresh lease and `await run()`; other tasks can tell it to stop."""

    def __init__(
        self,
        lease: Lease,
        database: Database,
        storage: Storage,
        engine: Engine,
        settings: Settings,
        clock: Callable[[], float],
        on_progress: Callable[[int, dict[str, Counts]], Coroutine[Any, Any, None]],
        begin_trial: Callable[[Lease, int, int], Coroutine[Any, Any, bool]],
        feed: Feed,
    ) -> None:
        self.lease = lease
        self._database = database
        self._storage = storage
        self._engine = engine
        self._settings = settings
        self._clock = clock
        self._on_progress = on_progress
        self._begin_trial = begin_trial
        self._feed = feed
        self._shard = Shard(storage, lease.slice_id)
        self._segment = 0
        self._answers: list[Answer] = []
        self._writing: list[Answer] = []  # the current segment's; a retry of a failed write must write the same
        self._answers_bytes = 0
        self._wake = asyncio.Event()
        self._flushing = asyncio.Lock()
        self._all_ran = False
        self._in_flight: dict[str, Request] = {}
        self._stopped_batches: set[str] = set()
        self._stopping = False
        self._counts: dict[str, Counts] = {}
        self.remaining = lease.count
        self.batch_ids: set[str] = set()

    @property
    def counts(self) -> dict[str, Counts]:
        """Return the counts of durable answers by batch."""
        return {each: self._counts.get(each, Counts()) for each in self.batch_ids}

    @property
    def stopping(self) -> bool:
        return self._stopping

    async def run(self) -> bool:
        """Run the slice. Returns True when every request of a live batch has its answer in the shard."""
        requests = await self._load()
        self.remaining = len(requests)
        about = {"slice": self.lease.slice_id, "epoch": self.lease.epoch, "requests": len(requests)}
        with tracing.stage("slice", sorted(self.batch_ids), worker=self._settings.worker_name, **about):
            await self._run(requests)
        return not self._stopping

    async def _run(self, requests: list[Request]) -> None:
        if requests and any(count != Counts() for count in self.counts.values()):
            await self._on_progress(self.lease.slice_id, self.counts)
        flusher = asyncio.create_task(self._flush_regularly())
        try:
            if self.lease.trial is None:
                await self._run_all(requests)
            else:
                await self._try(requests, self.lease.trial)
        finally:
            self._all_ran = True
            self._wake.set()
            await flusher
        await self._flush_to_the_end()

    async def _run_all(self, requests: Sequence[Request]) -> None:
        async with asyncio.TaskGroup() as group:
            for request in requests:
                await self._feed.turn()
                if self._stopping:
                    break
                group.create_task(self._run_one(request))

    async def _try(self, requests: Sequence[Request], trial: Trial) -> None:
        """Run a slice that workers died of, part by part: smaller after each death, larger while all goes well.

        A request that was alone in the engine at two deaths is not run again.
        """
        size = trial.size
        if requests and requests[0].place == trial.place and trial.alone_deaths >= ALONE_DEATHS_TO_REFUSE:
            with _about(requests[0]):
                log.error("request kills the engine")
            self._keep(requests[0], None, {"code": "server_error", "message": KILLS})
            self.remaining -= 1
            requests = requests[1:]
            await self._flush_to_the_end()  # before another request may kill this process
        while requests and not self._stopping:
            part, requests = requests[:size], requests[size:]
            if not await self._begin_trial(self.lease, len(part), part[0].place):
                self.stop()
                break
            await self._run_all(part)
            await self._flush_to_the_end()  # a part that is answered must not run again with the next one
            size *= 2

    def stop(self) -> None:
        """Abort the unanswered requests, because the worker stops or the lease is lost."""
        self._stopping = True
        self._abort(list(self._in_flight))

    def stop_batch(self, batch_id: str) -> None:
        """Abort the requests of a batch that was cancelled or has expired."""
        if batch_id not in self._stopped_batches:
            self._stopped_batches.add(batch_id)
            self._abort([rid for rid, request in self._in_flight.items() if request.batch_id == batch_id])

    def _abort(self, rids: list[str]) -> None:
        for rid in rids:
            self._engine.abort(rid)

    async def _load(self) -> list[Request]:
        """Return the unanswered requests of batches that are still in progress, in the order of the plan."""
        lease = self.lease
        async with self._database.read() as session:
            plan_id = (await session.scalars(select(Window.plan_id).where(Window.id == lease.window_id))).one()
            mine = select(SliceBatch.batch_id).where(SliceBatch.slice_id == lease.slice_id)
            rows = (await session.scalars(select(Batch).where(Batch.id.in_(mine)))).all()
        live = {row.id: row for row in rows if row.status == BatchStatus.IN_PROGRESS}
        self.batch_ids = {row.id for row in rows}
        if not live:
            return []
        artifact = PlanArtifact(self._storage, plan_id)
        header = await artifact.header()
        places = await artifact.places(lease.first, lease.count)
        answered = await self._resume()
        requests: list[Request] = []
        for member in np.unique(places["batch"]).tolist():
            batch = live.get(header.batches[member])
            if batch is None:
                continue
            positions = np.flatnonzero(places["batch"] == member)
            positions = [p for p in positions.tolist() if (batch.id, int(places["request"][p])) not in answered]
            requests.extend(await self._read(batch, positions, places["request"][positions]))
        return sorted(requests, key=lambda request: request.place)

    async def _resume(self) -> set[tuple[str, int]]:
        """Return the requests that earlier leases of this slice answered, as (batch, number), and count them."""
        answered: set[tuple[str, int]] = set()
        async for answer in self._shard.answers():
            key = (answer.batch_id, answer.request)
            if key not in answered:
                answered.add(key)
                self._count(answer)
        return answered

    async def _read(self, batch: Batch, positions: list[int], numbers: Any) -> list[Request]:
        index = RequestIndex(self._storage, batch.index_id or "")
        records = await index.pick(numbers)
        keys = await index.keys(numbers.tolist(), [1] * len(numbers))
        async with self._database.read() as session:
            profiles = await remembered(session, keys)
        lines = await self._storage.read_ranges(
            file_key(batch.input_file_id), records["offset"].tolist(), records["length"].tolist()
        )
        requests: list[Request] = []
        due = time.monotonic() + batch.expires_at - self._clock()
        for position, number, raw, (beginning, kind) in zip(
            positions, numbers.tolist(), lines, keys.tolist(), strict=True
        ):
            line = _line_decoder.decode(raw)
            place = self.lease.first + position
            lengths = profiles.get(beginning) or profiles.get(kind) or ""
            requests.append(Request(batch.id, number, line.url, line.custom_id, line.body, place, due, lengths))
        return requests

    async def _run_one(self, request: Request) -> None:
        with _about(request):
            await self._run_attempts(request)
        self.remaining -= 1

    async def _run_attempts(self, request: Request) -> None:
        fault = next(body_faults(request.body, self._settings.allow_patterns), None)
        if fault is not None:  # the file was validated when this was still allowed
            error = {"code": "invalid_request", "message": f"'body.{fault.param}' {fault.reason}."}
            self._keep(request, None, error)
            return
        for attempt in range(1, self._settings.request_attempts + 1):
            if self._given_up(request):
                break
            failure = await self._attempt(request)
            if failure is None or self._given_up(request):
                break
            log.warning("engine failed on a request", attempt=attempt, error=failure)
            if attempt == self._settings.request_attempts:
                message = f"The engine failed to answer this request in {attempt} attempts: {failure}"
                self._keep(request, None, {"code": "server_error", "message": message})
            else:
                RETRIES.labels(self._settings.served_model).inc()
                await asyncio.sleep(self._settings.flush_s * 2 ** (attempt - 1))

    def _given_up(self, request: Request) -> bool:
        return self._stopping or request.batch_id in self._stopped_batches

    async def _attempt(self, request: Request) -> str | None:
        """Run the request once and keep its answer. Returns the engine's error if it is not the request's fault."""
        rid = f"{BY_PATH[request.endpoint].id_prefix}{secrets.token_hex(16)}"
        self._in_flight[rid] = request
        try:
            answer = await self._engine.run(
                request.endpoint, request.body, rid, request.batch_id, request.due, request.lengths
            )
            if answer.aborted:
                return "it aborted the request"
            if answer.status_code >= 500:
                return error_message(answer.body)
            response = {
                "status_code": answer.status_code,
                "request_id": request.request_id,
                "body": msgspec.Raw(answer.body),
            }
            self._keep(request, response, None, usage_of(answer.body) if answer.status_code < 400 else None)
        except Exception as error:  # the boundary of a request: its line records the error
            log.exception("request failed")
            return f"{type(error).__name__}: {error}"
        finally:
            del self._in_flight[rid]
        return None

    def _keep(
        self,
        request: Request,
        response: dict[str, Any] | None,
        error: dict[str, str] | None,
        usage: Usage | None = None,
    ) -> None:
        """Keep the request's answer line. A line with usage is a success."""
        line = {
            "id": ids.batch_request_id(),
            "custom_id": request.custom_id,
            "response": response,
            "error": error,
        }
        encoded = msgspec.json.encode(line)
        answer = Answer(request.batch_id, request.number, usage is not None, usage or NO_USAGE, msgspec.Raw(encoded))
        self._answers.append(answer)
        self._answers_bytes += len(encoded)
        if self._answers_bytes >= FLUSH_BYTES:
            self._wake.set()

    async def _flush_regularly(self) -> None:
        while not self._all_ran:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.flush_s):
                    await self._wake.wait()
            self._wake.clear()
            await self._flush()

    async def _flush(self) -> bool:
        """Write the pending answers as segments. If object storage fails, keep them and return False."""
        async with self._flushing:
            return await self._write_segment()

    async def _write_segment(self) -> bool:
        while self._writing or self._answers:
            if not self._writing:
                self._writing, self._answers, self._answers_bytes = self._answers, [], 0
            try:
                with timed(SEGMENTS):
                    await self._shard.write(self.lease.epoch, self._segment, self._writing)
            except Exception:  # storage full or unreachable: the answers stay in memory until a write succeeds
                log.exception("segment not written")
                return False
            written, self._writing = self._writing, []
            self._segment += 1
            for answer in written:
                self._count(answer)
                count_answer(self._settings.served_model, answer.ok, answer.usage)
            await self._on_progress(self.lease.slice_id, self.counts)
        return True

    async def _flush_to_the_end(self) -> None:
        pause_s = self._settings.flush_s
        while not await self._flush() and not self._stopping:
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, 30.0)

    def _count(self, answer: Answer) -> None:
        self._counts[answer.batch_id] = self._counts.get(answer.batch_id, Counts()) + Counts.of(answer)
