"""The validator: reads a batch's file once, finds every error with its line, and leaves an index of its requests."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog
from sqlalchemy import select

from service import ids
from service.db.moves import move_batch
from service.db.sessions import Database
from service.db.tables import Batch, BatchStatus, Model
from service.jobs.desk import Desk
from service.jobs.lines import LineChecker, LineError, quoted
from service.jobs.tokens import PromptTokens
from service.request_index import RECORD, RequestIndex
from service.request_output import asked_output
from service.settings import Settings
from service.storage import LineTooLong, Storage, Writer, file_key

TOKENIZE_LINES = 256
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
log = structlog.get_logger()


@dataclass(slots=True)
class _Chunk:
    """Lines that passed, waiting to be tokenized together."""

    places: list[tuple[int, int, int, int]]  # offset, length, line number, asked output
    bodies: list[dict[str, Any]]


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
                await self.validate(by_id[batch_id])
        return batch_id is not None

    async def validate(self, batch: Batch) -> None:
        """Move the batch to in_progress with its index written, or to failed with its errors; safe to repeat."""
        checker = LineChecker(batch.endpoint)
        index = RequestIndex(self._storage, ids.index_id())
        try:
            async with (
                self._storage.writer(index.records_key) as records,
                self._storage.writer(index.tokens_key) as tokens,
            ):
                await self._read(batch, checker, records, tokens)
        except LineTooLong as error:
            limit = self._settings.max_line_bytes
            checker.add(LineError("invalid_request", f"The line is longer than {limit} bytes.", error.line))
        except FileNotFoundError:
            message = f"The input file {batch.input_file_id} is gone: it was deleted before the batch was validated."
            checker.add(LineError("invalid_request", message, None, "input_file_id"))
        if not checker.requests and not checker.errors:
            checker.add(LineError("empty_file", "The input file has no requests."))
        async with self._database.write() as session:
            if checker.errors:
                errors = [error.shape() for error in checker.errors]
                moved = await move_batch(session, batch.id, BatchStatus.FAILED, now=self._clock(), errors=errors)
            else:
                moved = await move_batch(
                    session,
                    batch.id,
                    BatchStatus.IN_PROGRESS,
                    now=self._clock(),
                    model=checker.model,
                    total=checker.requests,
                    index_id=index.index_id,
                )
        if checker.errors or not moved:
            await self._storage.delete_all(index.folder)
        log.info("validated", batch=batch.id, requests=checker.requests, errors=len(checker.errors), still_wanted=moved)

    async def _read(self, batch: Batch, checker: LineChecker, records: Writer, tokens: Writer) -> None:
        encoder: PromptTokens | None = None
        chunk, tokens_at, number = _Chunk([], []), 0, 0

        async def flush() -> None:
            nonlocal chunk, tokens_at
            if chunk.bodies and encoder is not None and not checker.errors:
                prompts = await asyncio.to_thread(encoder.encode, batch.endpoint, chunk.bodies)
                tokens_at = await _append(records, tokens, chunk.places, prompts, tokens_at)
            chunk = _Chunk([], [])

        async for offset, raw in self._storage.lines(file_key(batch.input_file_id), self._settings.max_line_bytes):
            number += 1
            if number == 1 and raw.startswith(BYTE_ORDER_MARK):
                offset, raw = len(BYTE_ORDER_MARK), raw.removeprefix(BYTE_ORDER_MARK)
            request = checker.check(number, raw)
            if request is None:
                continue
            if encoder is None and checker.requests == 1:
                encoder = await self._tokenizer(checker)
            if checker.requests > self._settings.max_lines:
                message = f"The file has more than {self._settings.max_lines} requests."
                checker.add(LineError("too_many_tasks", message, number))
                return
            chunk.places.append((offset, len(raw), number, asked_output(request.body).packed))
            chunk.bodies.append(request.body)
            if len(chunk.bodies) == TOKENIZE_LINES:
                await flush()
        await flush()

    async def _tokenizer(self, checker: LineChecker) -> PromptTokens | None:
        """The model's tokenizer; None, and an error noted, when no worker of this service serves the model."""
        name = checker.model or ""
        async with self._database.read() as session:
            known = (await session.scalars(select(Model).order_by(Model.name))).all()
        found = next((model for model in known if model.name == name), None)
        if found is None:
            names = ", ".join(model.name for model in known) or "none yet"
            message = f"The model {quoted(name)} does not exist here. Models: {names}."
            checker.add(LineError("model_not_found", message, checker.model_line, "body.model"))
            return None
        key = (name, found.source)
        if key not in self._tokenizers:
            self._tokenizers[key] = await asyncio.to_thread(PromptTokens.load, found.source)
        return self._tokenizers[key]


async def _append(
    records: Writer, tokens: Writer, places: list[tuple[int, int, int, int]], prompts: list[list[int]], tokens_at: int
) -> int:
    """Write records and token ids of a chunk; returns where the next token goes."""
    rows = np.zeros(len(places), dtype=RECORD)
    lengths = np.array([len(each) for each in prompts], dtype=np.int64)
    for column, name in enumerate(("offset", "length", "line", "asked")):
        rows[name] = [place[column] for place in places]
    rows["tokens"] = lengths
    rows["tokens_at"] = tokens_at + np.cumsum(lengths) - lengths
    flat = np.fromiter((token for each in prompts for token in each), dtype="<u4", count=int(lengths.sum()))
    await records.write(rows.tobytes())
    await tokens.write(flat.tobytes())
    return tokens_at + int(lengths.sum())
