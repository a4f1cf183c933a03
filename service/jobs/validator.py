"""The validator: reads a batch's file once, reports every error with its line, and writes an index of its requests."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Any

import structlog
from redis.exceptions import RedisError
from sqlalchemy import case, select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from batchweave.files import BYTE_ORDER_MARK
from service import ids
from service.db.clock import now_s
from service.db.moves import move_batch
from service.db.sessions import Database
from service.db.tables import Batch, BatchStatus, File, Model, OnLongLine, fixed
from service.endpoints import ModelName
from service.jobs.breath import Breath
from service.jobs.desk import Desk
from service.jobs.fair_turns import FairDesk
from service.jobs.index_writer import Bounded, IndexWriter, Place
from service.jobs.input_names import retried
from service.metrics import tracing
from service.metrics.counters import BATCHES_ENDED, VALIDATED
from service.objects.request_index import KEYS_BYTES, RECORD, RequestIndex
from service.objects.request_output import asked_output, with_limit
from service.objects.storage import LineTooLong, Storage, Writer, file_key
from service.queue.progress import Heartbeat
from service.requests.accept import Accept, known
from service.requests.lines import (
    MAX_ERRORS,
    LineChecker,
    LineError,
    RequestLine,
    custom_id_of,
    duplicate,
    quoted,
)
from service.requests.parameters import Unknown
from service.requests.tokens import PromptTokens, prompt_tokens
from service.settings import Settings
from service.tenants.quotas import enqueued_tokens, hold, room_for_bytes

AT_WORK_S = 60.0  # after this long without a sign of life, a validating process counts as dead
DEATHS_TO_SUSPECT, MOST_DEATHS = 2, 8
REQUESTS_PER_S = 2000.0  # work that each second of a turn adds, because lines may be long
LARGE_LINE = 64 * 1024  # bytes; longer lines are checked in a thread
# What another try would not change: the file meets an error of this program.
OUR_FAULTS = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
GIVEN_UP = "The service died each time it read this file. Split the file to find the lines that it cannot read."
MOST_ERROR_BYTES = 32 * 1024  # of the errors that a batch lists
LEAST_LINE = 64  # bytes of the shortest line with a request, about
TEMPLATE_TOKENS = 256  # of a chat's template, beside one token for each byte of the text
log = structlog.get_logger()

_WAITS = Batch.status == fixed(BatchStatus.VALIDATING)


class NotWanted(Exception):
    """The batch was cancelled, or ended, while its file was being read."""


def told(errors: Sequence[LineError]) -> list[dict[str, Any]]:
    """Return the first errors as the batch lists them, within bounds, and one entry that counts the rest."""
    shapes, size = list[dict[str, Any]](), 0
    for error in sorted(errors, key=lambda error: error.line or 0)[:MAX_ERRORS]:
        size += len(json.dumps(error.shape()))
        if shapes and size > MOST_ERROR_BYTES:
            more = f"{len(errors) - len(shapes)} more errors are not listed."
            return [*shapes, LineError("too_many_errors", more).shape()]
        shapes.append(error.shape())
    return shapes


async def _checked(checker: LineChecker, unknown: Unknown, number: int, raw: bytes) -> RequestLine | None:
    """Check a line and count its unknown parameters; of a large line in a thread, so that other tasks can run."""

    def check() -> RequestLine | None:
        request = checker.check(number, raw)
        if request is not None:
            unknown.count(request.body, known(checker.accept, request.batchweave))
        return request

    return await asyncio.to_thread(check) if len(raw) > LARGE_LINE else check()


class Validator:
    """Validates new batches, one per call."""

    def __init__(
        self,
        database: Database,
        storage: Storage,
        settings: Settings,
        clock: Callable[[], float],
        heartbeat: Heartbeat,
    ) -> None:
        self._database = database
        self._storage = storage
        self._heartbeat = heartbeat
        self._settings = settings
        self._clock = clock
        self._desk = FairDesk("validator", database, clock)
        self._desk_again = Desk("validator", clock)

    async def run_once(self) -> bool:
        """Validate one waiting batch. Returns whether it found one.

        Projects take turns by weight; within a project the earliest deadline comes first. Running batches whose index
        was lost come before them.
        """
        async with self._desk_again.take(await self._without_index()) as batch_id:
            if batch_id is not None:
                await self._index_again(batch_id)
                return True
        async with self._desk.take(_WAITS, self._first) as taken:
            if taken is not None:
                with tracing.stage("validate", [taken.batch_id]):
                    taken.work += await self._validate(taken.batch_id)
        return taken is not None

    async def _first(self, project_id: str) -> Sequence[str]:
        """Return the project's next batches. Those during whose validation processes died come last."""
        mine = select(Batch.id).where(Batch.project_id == project_id, _WAITS)
        if self._desk.in_work:  # a suspect is read alone, or other batches would be suspected with it
            mine = mine.where(Batch.validation_deaths < DEATHS_TO_SUSPECT)
        in_order = mine.order_by(Batch.validation_deaths, Batch.expires_at, Batch.seq)
        async with self._database.read() as session:
            return (await session.scalars(in_order.limit(self._desk.enough))).all()

    async def _validate(self, batch_id: str) -> float:
        """Validate the batch, counting the processes that die of it. Returns the work it took, in requests."""
        died = (Batch.validating_until < now_s(), Batch.validation_deaths + 1)
        deaths = case(died, else_=Batch.validation_deaths)
        batch = await self._note(batch_id, validation_deaths=deaths, validating_until=now_s() + AT_WORK_S)
        began, until = time.monotonic(), None
        try:
            requests = await self.validate(batch)
        except OUR_FAULTS:
            until = 0.0  # in the past, so that it counts as a death
            raise
        finally:
            with suppress(SQLAlchemyError, OSError):
                await self._note(batch_id, validating_until=until)
        return requests + REQUESTS_PER_S * (time.monotonic() - began)

    async def _note(self, batch_id: str, **values: Any) -> Batch:
        noted = update(Batch).where(Batch.id == batch_id).values(values)
        async with self._database.write() as session:
            return (await session.execute(noted.returning(Batch))).scalar_one()

    async def validate(self, batch: Batch) -> int:
        """Move the batch to in_progress and write its index, or to failed with its errors. Safe to repeat.

        Returns the number of its requests.
        """
        checker, unknown = self._checker(batch), self._unknown(batch)
        index, size, prompt_tokens = RequestIndex(self._storage, ids.index_id()), 0, 0
        try:
            if batch.validation_deaths > MOST_DEATHS:
                checker.add(LineError("server_error", GIVEN_UP))
            else:
                size, prompt_tokens = await self._write_index(batch, checker, unknown, index)
            await self._find_repeats(batch, checker)
        except FileNotFoundError:
            message = f"The input file {batch.input_file_id} was deleted before the batch was validated."
            if batch.retry_of is not None:
                message = f"This batch retries requests of {batch.retry_of}, but a file of that batch has been deleted."
            checker.add(LineError("invalid_request", message, None, "input_file_id"))
        except NotWanted:
            log.info("validation stopped: the batch was cancelled or has ended", batch=batch.id)
            return 0
        if not checker.requests and not checker.errors:
            checker.add(LineError("empty_file", "The input file has no requests."))
        async with self._database.write(batch.project_id) as session:
            if not checker.errors:
                await self._judge_quota(session, batch, checker, prompt_tokens, size)
            if checker.errors:
                errors = told(checker.errors)
                moved = await move_batch(session, batch.id, BatchStatus.FAILED, now=self._clock(), errors=errors)
            else:
                name = ModelName.of(checker.model or "")
                moved = await move_batch(
                    session,
                    batch.id,
                    BatchStatus.IN_PROGRESS,
                    now=self._clock(),
                    only_if=Batch.status == BatchStatus.VALIDATING,
                    model=name.base,
                    adapter=name.adapter,
                    total=checker.requests,
                    prompt_tokens=prompt_tokens,
                    index_id=index.index_id,
                    index_bytes=size,
                    unknown_parameters=unknown.shapes() or None,
                )
        if checker.errors or not moved:
            await self._storage.delete_all(index.folder)
        if checker.errors and moved:
            BATCHES_ENDED.labels(BatchStatus.FAILED.value).inc()
            tracing.batch_ended(batch.id, BatchStatus.FAILED, batch.created_at, self._clock())
        VALIDATED.inc(checker.requests)
        log.info("validated", batch=batch.id, requests=checker.requests, errors=len(checker.errors), still_wanted=moved)
        return checker.requests

    def _unknown(self, batch: Batch) -> Unknown:
        return Unknown(batch.endpoint, bool(self._settings.engine_args.get("enable_deterministic_inference")))

    def _checker(self, batch: Batch) -> LineChecker:
        return LineChecker(batch.endpoint, allow_patterns=self._settings.allow_patterns, accept=Accept.of(batch.accept))

    async def _write_index(
        self, batch: Batch, checker: LineChecker, unknown: Unknown, index: RequestIndex
    ) -> tuple[int, int]:
        """Check the batch's lines and write their index; return its size in bytes and the tokens of all prompts.

        Raises FileNotFoundError, NotWanted.
        """
        checker.only = await retried(self._database, self._storage, batch)
        async with self._database.read() as session:
            found = await session.scalars(select(File.size_bytes).where(File.id == batch.input_file_id))
        size = found.one()
        lines = min(size // LEAST_LINE, self._settings.max_lines)
        most_tokens = size + lines * TEMPLATE_TOKENS
        async with (
            self._storage.writer(index.records_key, lines * RECORD.itemsize) as to_records,
            self._storage.writer(index.tokens_key, most_tokens * 4) as to_tokens,
            self._storage.writer(index.keys_key, lines * KEYS_BYTES) as to_keys,
        ):
            parts = [Bounded(self._storage, to) for to in (to_records, to_tokens, to_keys)]
            prompt_tokens = await self._read(batch, checker, unknown, *parts)
            return sum(part.size_bytes for part in parts), prompt_tokens

    async def _without_index(self) -> Sequence[str]:
        """Return running batches whose index was lost."""
        lost = (Batch.status == fixed(BatchStatus.IN_PROGRESS)) & Batch.index_id.is_(None)
        async with self._database.read() as session:
            return (await session.scalars(select(Batch.id).where(lost).limit(self._desk_again.enough))).all()

    async def _index_again(self, batch_id: str) -> None:
        """Write the index of a running batch again. Its requests keep their numbers, as its file is the same."""
        async with self._database.read() as session:
            batch = (await session.scalars(select(Batch).where(Batch.id == batch_id))).one()
        checker, index = self._checker(batch), RequestIndex(self._storage, ids.index_id())
        checker.is_known = True
        values: dict[str, Any] = {}
        try:
            size, _ = await self._write_index(batch, checker, self._unknown(batch), index)
            if checker.errors or checker.requests != batch.total:
                await self._storage.delete_all(index.folder)
                raise OSError(f"the file of {batch.id} is not the one that was validated")
            values = {"index_id": index.index_id, "index_bytes": size}
        except NotWanted:
            return
        except FileNotFoundError:
            log.exception("an index and its file are lost", batch=batch.id)
        is_lost = (Batch.status == BatchStatus.IN_PROGRESS) & Batch.index_id.is_(None)
        async with self._database.write() as session:
            if values:
                await session.execute(update(Batch).where(Batch.id == batch.id, is_lost).values(values))
            else:  # what has no answer gets a line that says so
                await move_batch(session, batch.id, BatchStatus.FINALIZING, now=self._clock(), only_if=is_lost)
        log.warning("an index was lost and is written again", batch=batch.id, requests=checker.requests)

    async def _read(
        self, batch: Batch, checker: LineChecker, unknown: Unknown, records: Writer, tokens: Writer, keys: Writer
    ) -> int:
        """Check every line. Returns the number of tokens in all prompts. Raises FileNotFoundError."""
        encoder: PromptTokens | None = None
        index, number = IndexWriter(checker, batch.endpoint, records, tokens, keys, batch.project_id), 0
        index.fails_lines = batch.on_long_line == OnLongLine.FAIL_LINE
        breath = Breath(lambda: self._check_wanted(batch))
        try:
            async for offset, raw in self._lines(batch):
                number += 1
                await breath.draw()
                if number == 1 and raw.startswith(BYTE_ORDER_MARK):
                    offset, raw = len(BYTE_ORDER_MARK), raw.removeprefix(BYTE_ORDER_MARK)
                request = await _checked(checker, unknown, number, raw)
                if self._is_enough(checker, number):
                    break
                if request is None:
                    continue
                if encoder is None and checker.requests == 1:
                    encoder, index.context_length = await self._tokenizer(checker, unknown)
                if encoder is not None:
                    body = with_limit(batch.endpoint, request.body, batch.max_tokens)
                    # The worker takes the request's own limit where the context cannot hold more.
                    accept = known(checker.accept, request.batchweave)
                    asked = asked_output(batch.endpoint, with_limit(batch.endpoint, body, None, accept.more)).packed
                    await index.add(encoder, Place(offset, len(raw), number, asked, accept.thinking_tokens), body)
        except LineTooLong as error:
            limit = self._settings.max_line_bytes
            checker.add(LineError("invalid_request", f"The line is longer than {limit} bytes.", error.line))
        if encoder is not None:
            await index.finish(encoder)
        return index.prompt_tokens

    async def _check_wanted(self, batch: Batch) -> None:
        """Note that this process is still validating. Raises NotWanted if the batch has another state since."""
        if (await self._note(batch.id, validating_until=now_s() + AT_WORK_S)).status != batch.status:
            raise NotWanted(batch.id)

    def _is_enough(self, checker: LineChecker, number: int) -> bool:
        """Return whether to stop reading: the file is too long, or has as many errors as a batch lists."""
        most = self._settings.max_lines
        if checker.requests > most:
            checker.add(LineError("too_many_tasks", f"The file has more than {most} requests.", number))
        elif number > 2 * most:  # allows as many blank lines as requests
            message = f"The file has more than {2 * most} lines, but only {checker.requests} of them are requests."
            checker.add(LineError("too_many_tasks", message, number))
        else:
            return len(checker.errors) >= MAX_ERRORS
        return True

    async def _find_repeats(self, batch: Batch, checker: LineChecker) -> None:
        """Report lines that repeat an earlier custom_id. The file is read again only if it seems to have some."""
        suspects = await asyncio.to_thread(checker.custom_ids.suspects, MAX_ERRORS)
        last, number, seen = max(suspects, default=0), 0, dict[str, int]()
        if not suspects:
            return
        async for _, raw in self._lines(batch):
            number += 1
            if number in suspects:
                name = custom_id_of(raw.removeprefix(BYTE_ORDER_MARK) if number == 1 else raw)
                before = seen.setdefault(name, number)
                if before != number:
                    checker.errors.append(duplicate(name, number, before))
            if number == last:
                break

    def _lines(self, batch: Batch) -> AsyncIterator[tuple[int, bytes]]:
        return self._storage.lines(file_key(batch.input_file_id), self._settings.max_line_bytes)

    async def _judge_quota(
        self, session: AsyncSession, batch: Batch, checker: LineChecker, tokens: int, index_bytes: int
    ) -> None:
        project = await hold(session, batch.project_id)
        room = await room_for_bytes(session, project)
        if room is not None and index_bytes > room:
            message = (
                f"The batch's index has {index_bytes} bytes, but the project's quota has room for only {room}. "
                "Submit the batch again when other batches have finished, or delete files."
            )
            checker.add(LineError("bytes_quota", message))
        most = project.max_enqueued_tokens
        if most is None:
            return
        before = await enqueued_tokens(session, project.id)
        if before + tokens > most:
            message = (
                f"The batch has {tokens} prompt tokens and the project already has {before} enqueued; its quota is "
                f"{most}. Submit the batch again when other batches have finished, or split it."
            )
            checker.add(LineError("token_limit_exceeded", message))

    async def _is_served(self, name: str) -> bool:
        """Return whether a worker serves the model or is starting; also where Redis, which knows, does not answer."""
        try:
            alive, starting = await self._heartbeat.everyone()
        except (RedisError, OSError):
            return True
        taking = [each for each in alive if not each.get("drained")]
        return any(name in each.get("models", [each["model"]]) for each in (*taking, *starting))

    async def _tokenizer(self, checker: LineChecker, unknown: Unknown) -> tuple[PromptTokens | None, int | None]:
        """Return the model's tokenizer and its context length, if known.

        If this service does not know the model, or not for this endpoint, or refuses it because no worker serves it
        now, note an error and return no tokenizer.
        """
        name = checker.model or ""
        async with self._database.read() as session:
            known = (await session.scalars(select(Model).order_by(Model.name))).all()
        by_name = {model.name: model for model in known}
        found, base = by_name.get(name), by_name.get(ModelName.of(name).base)
        if found is None or base is None:
            names = ", ".join(model.name for model in known) or "none yet"
            message = f"The model {quoted(name)} does not exist here. Available models: {names}."
            checker.add(LineError("model_not_found", message, checker.model_line, "body.model"))
            return None, None
        if found.endpoints is not None and checker.endpoint not in found.endpoints:
            message = f"The model {quoted(name)} is not available for {checker.endpoint}. It is available for "
            checker.add(LineError("invalid_url", f"{message}{', '.join(found.endpoints)}.", checker.model_line, "url"))
            return None, None
        if self._settings.unserved == "refuse" and not await self._is_served(name):
            message = f"No worker serves the model {quoted(name)} now. Create the batch again once one does."
            checker.add(LineError("model_not_served", message, checker.model_line, "body.model"))
            return None, None
        unknown.finds_calls, unknown.finds_thoughts = found.tool_parser != "", found.reasoning_parser != ""
        return await asyncio.to_thread(prompt_tokens, base.source), found.context_length
