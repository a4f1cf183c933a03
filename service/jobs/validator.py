"""The validator: reads a batch's file once, finds every error with its line, and leaves an index of its requests."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import structlog
from sqlalchemy import case, select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from service import ids
from service.db.clock import now_s
from service.db.moves import move_batch
from service.db.sessions import Database
from service.db.tables import Batch, BatchStatus, Model, OnLongLine, fixed
from service.jobs.fair_turns import FairDesk
from service.jobs.index_writer import IndexWriter, Place
from service.metrics import tracing
from service.metrics.counters import BATCHES_ENDED, VALIDATED
from service.objects.request_index import RequestIndex
from service.objects.request_output import asked_output
from service.objects.storage import LineTooLong, Storage, Writer, file_key
from service.requests.lines import MAX_ERRORS, LineChecker, LineError, RequestLine, custom_id_of, duplicate, quoted
from service.requests.tokens import PromptTokens
from service.settings import Settings
from service.tenants.quotas import enqueued_tokens, hold, room_for_bytes

MAX_ERROR_LINE_BYTES = 64 * 1024 * 1024
LOOK_S = 2.0  # between two looks whether a batch is wanted still
AT_WORK_S = 60.0  # after which a process that validates counts as dead, unless it says so again
DEATHS_TO_SUSPECT, MOST_DEATHS = 2, 8
REQUESTS_PER_S = 2000.0  # of a turn's work: its seconds count too, as lines may be long
LARGE_LINE = 64 * 1024  # which is looked at in a thread
GIVEN_UP = "The service stopped each time it read this file. Split it, to find the lines that it cannot read."
MOST_ERROR_BYTES = 32 * 1024  # of those that a batch tells
BREATH_S = 0.02  # in which one file is read before others have their turn
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
log = structlog.get_logger()

_WAITS = Batch.status == fixed(BatchStatus.VALIDATING)


class NotWanted(Exception):
    """The batch was cancelled, or has ended, while its file was read."""


def told(errors: Sequence[LineError]) -> list[dict[str, Any]]:
    """The first of these as the batch tells them, within bounds, and how many more there are."""
    shapes, size = list[dict[str, Any]](), 0
    for error in sorted(errors, key=lambda error: error.line or 0)[:MAX_ERRORS]:
        size += len(json.dumps(error.shape()))
        if shapes and size > MOST_ERROR_BYTES:
            more = f"{len(errors) - len(shapes)} more errors are not listed."
            return [*shapes, LineError("too_many_errors", more).shape()]
        shapes.append(error.shape())
    return shapes


async def _checked(checker: LineChecker, number: int, raw: bytes) -> RequestLine | None:
    """As LineChecker.check, and others have their turn while a large line is looked at."""
    return await asyncio.to_thread(checker.check, number, raw) if len(raw) > LARGE_LINE else checker.check(number, raw)


class Breath:
    """Pauses for others while a long file is read; every few seconds `look` raises if it is to be read no further."""

    def __init__(self, look: Callable[[], Awaitable[None]]) -> None:
        self._look = look
        self._pause_at = time.monotonic() + BREATH_S
        self._look_at = self._pause_at + LOOK_S

    async def draw(self) -> None:
        if time.monotonic() > self._pause_at:
            await asyncio.sleep(0)
            self._pause_at = time.monotonic() + BREATH_S
            if self._pause_at > self._look_at:
                self._look_at = self._pause_at + LOOK_S
                await self._look()


@dataclass(slots=True)
class Bounded:
    """A writer that leaves the reserve of the store's disk alone, and counts."""

    storage: Storage
    writer: Writer
    size_bytes: int = 0

    async def write(self, data: bytes) -> None:
        self.storage.check_room(len(data))
        self.size_bytes += len(data)
        await self.writer.write(data)


class Validator:
    def __init__(self, database: Database, storage: Storage, settings: Settings, clock: Callable[[], float]) -> None:
        self._database = database
        self._storage = storage
        self._settings = settings
        self._clock = clock
        self._desk = FairDesk("validator", database, clock)
        self._tokenizers: dict[tuple[str, str], PromptTokens] = {}

    async def run_once(self) -> bool:
        """Validate one batch that waits for it; whether there was one.

        Projects take turns by weight; of a project the earliest deadline is first.
        """
        async with self._desk.take(_WAITS, self._first) as taken:
            if taken is not None:
                with tracing.stage("validate", [taken.batch_id]):
                    taken.work += await self._validate(taken.batch_id)
        return taken is not None

    async def _first(self, project_id: str) -> Sequence[str]:
        """Those last whose validation did not end before."""
        mine = select(Batch.id).where(Batch.project_id == project_id, _WAITS)
        if self._desk.in_work:  # what processes died of is read alone, or others would be suspected with it
            mine = mine.where(Batch.validation_deaths < DEATHS_TO_SUSPECT)
        in_order = mine.order_by(Batch.validation_deaths, Batch.expires_at, Batch.seq)
        async with self._database.read() as session:
            return (await session.scalars(in_order.limit(self._desk.enough))).all()

    async def _validate(self, batch_id: str) -> float:
        """Returns its work, in requests. One that no process survives is given up after a few tries."""
        died = (Batch.validating_until < now_s(), Batch.validation_deaths + 1)
        deaths = case(died, else_=Batch.validation_deaths)
        batch = await self._note(batch_id, validation_deaths=deaths, validating_until=now_s() + AT_WORK_S)
        began = time.monotonic()
        try:
            requests = await self.validate(batch)
        finally:
            with suppress(SQLAlchemyError, OSError):
                await self._note(batch_id, validating_until=None)
        return requests + REQUESTS_PER_S * (time.monotonic() - began)

    async def _note(self, batch_id: str, **values: Any) -> Batch:
        noted = update(Batch).where(Batch.id == batch_id).values(values)
        async with self._database.write() as session:
            return (await session.execute(noted.returning(Batch))).scalar_one()

    async def validate(self, batch: Batch) -> int:
        """Move the batch to in_progress with its index written, or to failed with its errors; safe to repeat.

        Returns how many requests it has.
        """
        checker, prompt_tokens = LineChecker(batch.endpoint, allow_patterns=self._settings.allow_patterns), 0
        index, size = RequestIndex(self._storage, ids.index_id()), 0
        try:
            checker.only = await self._wanted(batch)
            async with (
                self._storage.writer(index.records_key) as to_records,
                self._storage.writer(index.tokens_key) as to_tokens,
            ):
                records, tokens = Bounded(self._storage, to_records), Bounded(self._storage, to_tokens)
                if batch.validation_deaths > MOST_DEATHS:
                    checker.add(LineError("server_error", GIVEN_UP))
                else:
                    prompt_tokens = await self._read(batch, checker, records, tokens)
                size = records.size_bytes + tokens.size_bytes
            await self._find_repeats(batch, checker)
        except FileNotFoundError:
            message = f"The input file {batch.input_file_id} is gone: it was deleted before the batch was validated."
            if batch.retry_of is not None:
                message = f"A file of {batch.retry_of}, which this batch repeats in part, was deleted meanwhile."
            checker.add(LineError("invalid_request", message, None, "input_file_id"))
        except NotWanted:
            log.info("no longer wanted", batch=batch.id)
            return 0
        if not checker.requests and not checker.errors:
            checker.add(LineError("empty_file", "The input file has no requests."))
        async with self._database.write() as session:
            if not checker.errors:
                await self._judge_quota(session, batch, checker, prompt_tokens, size)
            if checker.errors:
                errors = told(checker.errors)
                moved = await move_batch(session, batch.id, BatchStatus.FAILED, now=self._clock(), errors=errors)
            else:
                moved = await move_batch(
                    session,
                    batch.id,
                    BatchStatus.IN_PROGRESS,
                    now=self._clock(),
                    model=checker.model,
                    total=checker.requests,
                    prompt_tokens=prompt_tokens,
                    index_id=index.index_id,
                    index_bytes=size,
                )
        if checker.errors or not moved:
            await self._storage.delete_all(index.folder)
        if checker.errors and moved:
            BATCHES_ENDED.labels(BatchStatus.FAILED.value).inc()
            tracing.batch_ended(batch.id, BatchStatus.FAILED, batch.created_at, self._clock())
        VALIDATED.inc(checker.requests)
        log.info("validated", batch=batch.id, requests=checker.requests, errors=len(checker.errors), still_wanted=moved)
        return checker.requests

    async def _read(self, batch: Batch, checker: LineChecker, records: Writer, tokens: Writer) -> int:
        """Look at every line; returns how many tokens all prompts have. Raises FileNotFoundError."""
        encoder: PromptTokens | None = None
        index, number = IndexWriter(checker, batch.endpoint, records, tokens), 0
        index.fails_lines = batch.on_long_line == OnLongLine.FAIL_LINE
        breath = Breath(lambda: self._check_wanted(batch))
        try:
            async for offset, raw in self._lines(batch):
                number += 1
                await breath.draw()
                if number == 1 and raw.startswith(BYTE_ORDER_MARK):
                    offset, raw = len(BYTE_ORDER_MARK), raw.removeprefix(BYTE_ORDER_MARK)
                request = await _checked(checker, number, raw)
                if self._is_enough(checker, number):
                    break
                if request is None:
                    continue
                if encoder is None and checker.requests == 1:
                    encoder, index.context_length = await self._tokenizer(checker)
                if encoder is not None:
                    asked = asked_output(batch.endpoint, request.body).packed
                    await index.add(encoder, Place(offset, len(raw), number, asked), request.body)
        except LineTooLong as error:
            limit = self._settings.max_line_bytes
            checker.add(LineError("invalid_request", f"The line is longer than {limit} bytes.", error.line))
        if encoder is not None:
            await index.finish(encoder)
        return index.prompt_tokens

    async def _check_wanted(self, batch: Batch) -> None:
        """Raises NotWanted; says that somebody is at it."""
        if (await self._note(batch.id, validating_until=now_s() + AT_WORK_S)).status != BatchStatus.VALIDATING:
            raise NotWanted(batch.id)

    def _is_enough(self, checker: LineChecker, number: int) -> bool:
        """Whether nothing more is to be learned from the file: it is too long, or has all errors that are told."""
        most = self._settings.max_lines
        if checker.requests > most:
            checker.add(LineError("too_many_tasks", f"The file has more than {most} requests.", number))
        elif number > 2 * most:  # as many blank ones as requests may be between them
            message = f"The file has more than {2 * most} lines, {checker.requests} of them requests."
            checker.add(LineError("too_many_tasks", message, number))
        else:
            return len(checker.errors) >= MAX_ERRORS
        return True

    async def _find_repeats(self, batch: Batch, checker: LineChecker) -> None:
        """Note the lines whose custom_id an earlier one has; only a file that seems to have some is read again."""
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

    async def _wanted(self, batch: Batch) -> frozenset[str] | None:
        """The custom_ids of what a retry repeats: the error file's. Raises FileNotFoundError."""
        if batch.retry_of is None:
            return None
        async with self._database.read() as session:
            source = await session.scalar(select(Batch.error_file_id).where(Batch.id == batch.retry_of))
        lines = self._storage.lines(file_key(source or ""), MAX_ERROR_LINE_BYTES)
        return frozenset([custom_id_of(line) async for _, line in lines])

    async def _judge_quota(
        self, session: AsyncSession, batch: Batch, checker: LineChecker, tokens: int, index_bytes: int
    ) -> None:
        project = await hold(session, batch.project_id)
        room = await room_for_bytes(session, project)
        if room is not None and index_bytes > room:
            message = f"The batch's index has {index_bytes} bytes, and the project's quota has room for {room}."
            checker.add(LineError("bytes_quota", f"{message} Send it again when others have ended, or delete files."))
        most = project.max_enqueued_tokens
        if most is None:
            return
        before = await enqueued_tokens(session, project.id)
        if before + tokens > most:
            message = (
                f"The batch has {tokens} prompt tokens, and {before} more are enqueued; the project's quota is {most}. "
                "Send it again when others have ended, or split it."
            )
            checker.add(LineError("token_limit_exceeded", message))

    async def _tokenizer(self, checker: LineChecker) -> tuple[PromptTokens | None, int | None]:
        """The model's tokenizer and context length, as far as they are known.

        Without a tokenizer an error is noted: no worker of this service serves the model, or not for this endpoint.
        """
        name = checker.model or ""
        async with self._database.read() as session:
            known = (await session.scalars(select(Model).order_by(Model.name))).all()
        found = next((model for model in known if model.name == name), None)
        if found is None:
            names = ", ".join(model.name for model in known) or "none yet"
            message = f"The model {quoted(name)} does not exist here. Models: {names}."
            checker.add(LineError("model_not_found", message, checker.model_line, "body.model"))
            return None, None
        if found.endpoints is not None and checker.endpoint not in found.endpoints:
            message = f"The model {quoted(name)} is not served for {checker.endpoint}; it is for "
            checker.add(LineError("invalid_url", f"{message}{', '.join(found.endpoints)}.", checker.model_line, "url"))
            return None, None
        key = (name, found.source)
        if key not in self._tokenizers:
            self._tokenizers[key] = await asyncio.to_thread(PromptTokens.load, found.source)
        return self._tokenizers[key], found.context_length
