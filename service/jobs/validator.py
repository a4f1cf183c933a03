"""The validator: reads a batch's file once, finds every error with its line, and leaves an index of its requests."""

import asyncio
from collections.abc import AsyncIterator, Callable

import structlog
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from service import ids, tracing
from service.db.moves import move_batch
from service.db.sessions import Database
from service.db.tables import Batch, BatchStatus, Model
from service.jobs.desk import Desk
from service.jobs.index_writer import IndexWriter, Place
from service.jobs.lines import MAX_ERRORS, LineChecker, LineError, custom_id_of, duplicate, quoted
from service.jobs.tokens import PromptTokens
from service.metrics.counters import VALIDATED
from service.request_index import RequestIndex
from service.request_output import asked_output
from service.settings import Settings
from service.storage import LineTooLong, Storage, Writer, file_key
from service.tenants.quotas import enqueued_tokens, hold

MAX_ERROR_LINE_BYTES = 64 * 1024 * 1024
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
log = structlog.get_logger()


class Validator:
    def __init__(self, database: Database, storage: Storage, settings: Settings, clock: Callable[[], float]) -> None:
        self._database = database
        self._storage = storage
        self._settings = settings
        self._clock = clock
        self._desk = Desk("validator", clock)
        self._tokenizers: dict[tuple[str, str], PromptTokens] = {}

    async def run_once(self) -> bool:
        """Validate one batch that waits for it, the earliest deadline first; whether there was one."""
        async with self._database.read() as session:
            waiting = (
                await session.scalars(
                    select(Batch).where(Batch.status == BatchStatus.VALIDATING).order_by(Batch.expires_at, Batch.seq)
                )
            ).all()
        by_id = {batch.id: batch for batch in waiting}
        async with self._desk.take(by_id) as batch_id:
            if batch_id is not None:
                with tracing.stage("validate", [batch_id]):
                    await self.validate(by_id[batch_id])
        return batch_id is not None

    async def validate(self, batch: Batch) -> None:
        """Move the batch to in_progress with its index written, or to failed with its errors; safe to repeat."""
        checker, prompt_tokens = LineChecker(batch.endpoint), 0
        index = RequestIndex(self._storage, ids.index_id())
        try:
            checker.only = await self._wanted(batch)
            async with (
                self._storage.writer(index.records_key) as records,
                self._storage.writer(index.tokens_key) as tokens,
            ):
                prompt_tokens = await self._read(batch, checker, records, tokens)
            await self._find_repeats(batch, checker)
        except FileNotFoundError:
            message = f"The input file {batch.input_file_id} is gone: it was deleted before the batch was validated."
            if batch.retry_of is not None:
                message = f"A file of {batch.retry_of}, which this batch repeats in part, was deleted meanwhile."
            checker.add(LineError("invalid_request", message, None, "input_file_id"))
        if not checker.requests and not checker.errors:
            checker.add(LineError("empty_file", "The input file has no requests."))
        async with self._database.write() as session:
            if not checker.errors:
                await self._judge_quota(session, batch, checker, prompt_tokens)
            if checker.errors:
                in_order = sorted(checker.errors, key=lambda error: error.line or 0)
                errors = [error.shape() for error in in_order[:MAX_ERRORS]]
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
                )
        if checker.errors or not moved:
            await self._storage.delete_all(index.folder)
        if checker.errors and moved:
            tracing.batch_ended(batch.id, BatchStatus.FAILED, batch.created_at, self._clock())
        VALIDATED.inc(checker.requests)
        log.info("validated", batch=batch.id, requests=checker.requests, errors=len(checker.errors), still_wanted=moved)

    async def _read(self, batch: Batch, checker: LineChecker, records: Writer, tokens: Writer) -> int:
        """Look at every line; returns how many tokens all prompts have. Raises FileNotFoundError."""
        encoder: PromptTokens | None = None
        index, number = IndexWriter(checker, batch.endpoint, records, tokens), 0
        try:
            async for offset, raw in self._lines(batch):
                number += 1
                if number == 1 and raw.startswith(BYTE_ORDER_MARK):
                    offset, raw = len(BYTE_ORDER_MARK), raw.removeprefix(BYTE_ORDER_MARK)
                request = checker.check(number, raw)
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

    async def _judge_quota(self, session: AsyncSession, batch: Batch, checker: LineChecker, tokens: int) -> None:
        project = await hold(session, batch.project_id)
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
