"""Runs the requests of one leased slice that have no answer yet, and keeps every answer."""

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import msgspec
import numpy as np
import structlog
from numpy.typing import NDArray
from sqlalchemy.exc import SQLAlchemyError

from service import ids
from service.db.sessions import Database
from service.endpoints import BY_PATH
from service.metrics import tracing
from service.metrics.counters import HANDED_OVER, RETRIES, SEGMENTS, count_answer, timed
from service.objects.json_lines import line_of
from service.objects.plan_artifact import SLICE_BYTES
from service.objects.shards import Answer, Outcome, Shard, Told, Usage
from service.objects.storage import Storage
from service.queue.counts import Counts
from service.queue.leases import ALONE_DEATHS_TO_REFUSE, BatchEnded, Lease, Leases, Trial
from service.requests.body_limits import body_faults
from service.settings import Settings
from service.worker.answer_body import NO_USAGE, error_code, error_message, read, usage_of
from service.worker.batch_engine import Engine
from service.worker.feed import Feed
from service.worker.judge import outcomes_of
from service.worker.slice_requests import Request, divided, load
from service.worker.tries import Tries

KILLS = "The engine died each time it ran this request, even alone. The other requests continue without it."
FLUSH_BYTES = 4 * 1024 * 1024
log = structlog.get_logger()


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
        leases: Leases,
        feed: Feed,
    ) -> None:
        self.lease = lease
        self._database = database
        self._storage = storage
        self._engine = engine
        self._settings = settings
        self._clock = clock
        self._on_progress = on_progress
        self._leases = leases
        self._feed = feed
        self._shard = Shard(storage, lease.slice_id)
        self._places = np.empty(0, dtype=np.int64)  # of the slice's requests in the window's order
        self._segment = 0  # the number of the next one
        self._before: Told = list(lease.before)  # how many segments earlier leases wrote
        self._answers: list[Answer] = []
        self._writing: list[Answer] = []  # the current segment's; a retry of a failed write must write the same
        self._answers_bytes = 0
        self._wake = asyncio.Event()
        self._flushing = asyncio.Lock()
        self._all_ran = False
        self._in_flight: dict[str, Request] = {}
        self._group: asyncio.TaskGroup | None = None  # of the requests that run now
        self._asked_back: set[str] = set()  # rids that the engine may give back before they begin
        self._given: list[Request] = []  # those that it has given back
        self._stopped_batches: set[str] = set()
        self._stopping = False
        self._counts: dict[str, Counts] = {}
        self._left = Counter[str]()  # by batch: requests without a durable answer
        self._let_go = set[str]()  # batches whose share of the slice is done
        self.remaining = lease.count
        self.size = SLICE_BYTES  # of the lines of these; as many as they may have until they are read
        self.answered = 0  # in this run
        self.batch_ids: set[str] = set()

    @property
    def counts(self) -> dict[str, Counts]:
        """Return the counts of durable answers by batch."""
        return {each: self._counts.get(each, Counts()) for each in self.batch_ids}

    @property
    def segments(self) -> Told:
        """Return how many segments each lease of the slice has written; None while one may have been written."""
        return [*self._before, (self.lease.epoch, None if self._writing else self._segment)]

    @property
    def stopping(self) -> bool:
        return self._stopping

    @property
    def answered_batches(self) -> dict[str, Counts]:
        """Return the counts of the batches that have all their answers, while others of the slice have not."""
        held = self.batch_ids - self._let_go
        done = {each for each in held if not self._left[each]}
        return {each: self.counts[each] for each in done} if done < held else {}

    def let_go(self, batch_ids: Iterable[str]) -> None:
        """Note that these batches' shares are done."""
        self._let_go.update(batch_ids)

    async def run(self) -> bool:
        """Run the slice. Returns True when every request of a live batch has its answer in the shard."""
        found = await load(self.lease, self._database, self._storage, self._clock)
        requests, self._places, self._before = found.requests, found.places, found.segments
        self.batch_ids, self._counts = found.batch_ids, found.counts
        self.remaining, self.size = len(requests), sum(request.size for request in requests)
        self._left.update(request.batch_id for request in requests)
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

    async def _run_all(self, requests: list[Request]) -> None:
        """Run these requests, and let go of each, because its body may be large."""
        requests.reverse()
        async with asyncio.TaskGroup() as group:
            self._group = group
            while requests:
                await self._feed.turn()
                if self._stopping:
                    break
                group.create_task(self._run_one(requests.pop()))

    async def _try(self, requests: list[Request], trial: Trial) -> None:
        """Run a slice that workers died of, part by part: smaller after each death, larger while all goes well.

        A request that was alone in the engine at two deaths is not run again.
        """
        size = trial.size
        if requests and requests[0].place == trial.place and trial.alone_deaths >= ALONE_DEATHS_TO_REFUSE:
            with _about(requests[0]):
                log.error("request kills the engine")
            self._keep(requests[0], None, {"code": "server_error", "message": KILLS})
            self.remaining -= 1
            self.size -= requests[0].size
            requests = requests[1:]
            await self._flush_to_the_end()  # before another request may kill this process
        while requests and not self._stopping:
            part, requests = requests[:size], requests[size:]
            if not await self._leases.begin_trial(self.lease, len(part), part[0].place):
                self.stop()
                break
            await self._run_all(part)
            await self._flush_to_the_end()  # a part that is answered must not run again with the next one
            size *= 2

    async def hand_over(self, most: int, workers: int) -> int:
        """Hand over up to `most` requests that have not begun, divided for this many workers; return how many went."""
        if self._group is None or self.lease.trial is not None or self._stopping or not self._in_flight:
            return 0
        # A task beside the requests, so that the slice does not end before it.
        task = self._group.create_task(self._hand_over(self._group, most, workers))
        await asyncio.wait([task])
        return 0 if task.cancelled() else task.result()

    async def _hand_over(self, group: asyncio.TaskGroup, most: int, workers: int) -> int:
        self._asked_back = {
            rid for rid, request in self._in_flight.items() if request.batch_id not in self._stopped_batches
        }
        last_first = sorted(self._asked_back, key=lambda rid: -self._in_flight[rid].place)
        try:
            await self._engine.withdraw(last_first, most)
        except Exception:  # the boundary of this task: the requests go their way
            log.exception("the engine gives nothing back")
        back, self._given, self._asked_back = sorted(self._given, key=lambda each: -each.place), [], set()
        # Each of several data-parallel ranks gives back as many as were asked for.
        if back and not self._stopping:
            self._places = await self._keep_the_rest(back[:most], workers)
        here = set(self._places.tolist())
        handed = sum(request.place not in here for request in back)
        HANDED_OVER.labels(self._settings.served_model).inc(handed)
        self.remaining -= handed
        self.size -= sum(request.size for request in back if request.place not in here)
        self._left.subtract(request.batch_id for request in back if request.place not in here)
        for request in back:
            if request.place in here:
                await self._feed.turn()
                group.create_task(self._run_one(request))
        return handed

    async def _keep_the_rest(self, given: Sequence[Request], workers: int) -> NDArray[np.int64]:
        """Make slices of the requests `given`; return the places of those that this slice has afterwards."""
        kept, parts = divided(self._places, given, workers)
        try:
            if not await self._leases.hand_over(self.lease, kept, parts):
                self.stop()
                return self._places
            log.info("handed over", slice=self.lease.slice_id, requests=len(given), slices=len(parts))
            return kept
        except BatchEnded:
            return self._places
        except (SQLAlchemyError, OSError, TimeoutError) as error:  # the commit may have come through
            log.warning("does not know what it handed over", slice=self.lease.slice_id, error=repr(error))
        while not self._stopping:
            with contextlib.suppress(SQLAlchemyError, OSError, TimeoutError):
                places = await self._leases.places(self.lease)
                if places is not None:
                    return places
                self.stop()
            await asyncio.sleep(self._settings.flush_s)
        return kept

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

    async def _run_one(self, request: Request) -> None:
        with _about(request):
            await self._run_attempts(request)
        if request not in self._given:
            self.remaining -= 1
            self.size -= request.size

    async def _run_attempts(self, request: Request) -> None:
        tries, attempt = Tries(request.accept, request.endpoint, request.body), 0
        fault = next(body_faults(tries.next_body(), self._settings.allow_patterns), None)
        if fault is not None:  # the file was validated when this was still allowed
            error = {"code": "invalid_request", "message": f"'body.{fault.param}' {fault.reason}."}
            self._keep(request, None, error)
            return
        while attempt < self._settings.request_attempts and not self._given_up(request):
            attempt += 1
            failure = await self._attempt(request, tries)
            if tries.is_due:
                attempt = 0
                continue
            if failure is None or self._given_up(request) or request in self._given:
                break
            log.warning("engine failed on a request", attempt=attempt, error=failure)
            tries.turns = []  # which may be what it fails on
            if attempt == self._settings.request_attempts:
                message = f"The engine failed to answer this request in {attempt} attempts: {failure}"
                self._keep(request, None, {"code": "server_error", "message": message}, tries.spent)
            else:
                RETRIES.labels(self._settings.served_model).inc()
                await asyncio.sleep(self._settings.flush_s * 2 ** (attempt - 1))

    def _given_up(self, request: Request) -> bool:
        return self._stopping or request.batch_id in self._stopped_batches

    async def _attempt(self, request: Request, tries: Tries) -> str | None:
        """Run the request once and keep its answer, unless there is another try.

        Returns the engine's error if it is not the request's fault.
        """
        rid = f"{BY_PATH[request.endpoint].id_prefix}{secrets.token_hex(16)}"
        self._in_flight[rid] = request
        try:
            body = tries.next_body()
            answer = await self._engine.run(request.endpoint, body, rid, request.batch_id, request.terms)
            if answer.aborted:
                if rid in self._asked_back and not self._given_up(request):
                    self._given.append(request)
                return "it aborted the request"
            if answer.status_code >= 500:
                return error_message(answer.body)
            response = {
                "status_code": answer.status_code,
                "request_id": request.request_id,
                "body": msgspec.Raw(answer.body),
            }
            if answer.status_code < 400:
                body = read(answer.body)
                usage, outcomes = usage_of(body), outcomes_of(request.body, body)
                if answer.looped:
                    outcomes.insert(0, Outcome.LOOPED)
                if tries.has_another(outcomes, usage, body):
                    return None
                response["body"] = msgspec.Raw(tries.noted(answer.body))
                refusal, outcome = tries.refusal(outcomes), next(iter(outcomes), Outcome.OK)
                self._keep(request, response, refusal, tries.plus(usage), outcome, ok=refusal is None)
            elif not tries.asks_for_less(error_code(answer.body)):
                self._keep(request, response, None, tries.spent)
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
        usage: Usage = NO_USAGE,
        outcome: Outcome = Outcome.OK,
        ok: bool = False,
    ) -> None:
        """Keep the request's answer line; `ok`: it is a success."""
        self.answered += 1
        line = {
            "id": ids.batch_request_id(),
            "custom_id": request.custom_id,
            "response": response,
            "error": error,
        }
        encoded = line_of(line)
        about = (request.batch_id, request.number, ok, usage)
        answer = Answer(*about, msgspec.Raw(encoded), outcome)
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
                self._left[answer.batch_id] -= 1
                count_answer(self._settings.served_model, answer)
            await self._on_progress(self.lease.slice_id, self.counts)
        return True

    async def _flush_to_the_end(self) -> None:
        pause_s = self._settings.flush_s
        while not await self._flush() and not self._stopping:
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, 30.0)

    def _count(self, answer: Answer) -> None:
        self._counts[answer.batch_id] = self._counts.get(answer.batch_id, Counts()) + Counts.of(answer)
