"""The finalizer: joins shards into the output and error files, one line per custom_id, and ends the batch."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog
from sqlalchemy import exists, select

from service import ids
from service.db.moves import TERMINAL, move_batch
from service.db.sessions import Database
from service.db.tables import Batch, BatchStatus, File, Slice, SliceBatch, SliceStatus, Window
from service.plan_artifact import PlanArtifact
from service.queue.progress import Progress
from service.settings import Settings
from service.shards import Answer, Shard, Usage
from service.storage import Storage, Writer

FILES_KEEP_S = 30 * 24 * 3600
EXPIRED = ("batch_expired", "This request could not be executed before the completion window expired.")
CANCELLED = ("batch_cancelled", "This request was not executed because the batch was cancelled.")
LOST = ("server_error", "The service has no answer for this request. Submit it again.")
log = structlog.get_logger()


class EndedElsewhere(Exception):
    """Another finalizer ended the batch first, or it was cancelled meanwhile; its rows stand, ours roll back."""


class _CustomId(msgspec.Struct):
    custom_id: str


_custom_id = msgspec.json.Decoder(_CustomId)


@dataclass(slots=True)
class ResultFile:
    """An output or error file in the making; it becomes an object only when a line comes."""

    storage: Storage
    stack: AsyncExitStack
    kind: str
    id: str = field(default_factory=ids.file_id)
    size_bytes: int = 0
    lines: int = 0
    _writer: Writer | None = None

    async def add(self, line: bytes) -> None:
        if self._writer is None:
            self._writer = await self.stack.enter_async_context(self.storage.writer(f"files/{self.id}"))
        await self._writer.write(line + b"\n")
        self.size_bytes += len(line) + 1
        self.lines += 1

    def row(self, batch: Batch, now: int) -> File:
        keep_s = FILES_KEEP_S if batch.output_expires_after_s is None else batch.output_expires_after_s
        return File(
            id=self.id,
            purpose="batch_output",
            filename=f"{batch.id}_{self.kind}.jsonl",
            size_bytes=self.size_bytes,
            created_at=now,
            expires_at=now + keep_s,
        )


@dataclass(slots=True)
class Tally:
    """Tokens of the answers that count."""

    input: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0

    def add(self, usage: Usage) -> None:
        self.input += usage.input
        self.cached += usage.cached
        self.output += usage.output
        self.reasoning += usage.reasoning


class Finalizer:
    def __init__(
        self,
        database: Database,
        storage: Storage,
        progress: Progress,
        settings: Settings,
        clock: Callable[[], float],
    ) -> None:
        self._database = database
        self._storage = storage
        self._progress = progress
        self._settings = settings
        self._clock = clock

    async def run_once(self) -> int:
        """End every batch that can end; returns how many."""
        await self._begin_finished()
        async with self._database.read() as session:
            ending = (
                await session.scalars(
                    select(Batch)
                    .where(Batch.status.in_([BatchStatus.FINALIZING, BatchStatus.CANCELLING]))
                    .order_by(Batch.seq)
                )
            ).all()
        for batch in ending:
            await self.finalize(batch)
        return len(ending)

    async def _begin_finished(self) -> None:
        """Move to finalizing the batches whose every request is planned and every slice done."""
        unfinished = exists().where(
            SliceBatch.batch_id == Batch.id, Slice.id == SliceBatch.slice_id, Slice.status != SliceStatus.DONE
        )
        async with self._database.read() as session:
            finished = (
                await session.scalars(
                    select(Batch.id).where(
                        Batch.status == BatchStatus.IN_PROGRESS, Batch.planned == Batch.total, ~unfinished
                    )
                )
            ).all()
        if finished:
            async with self._database.write() as session:
                for batch_id in finished:
                    await move_batch(session, batch_id, BatchStatus.FINALIZING, now=self._clock())

    async def finalize(self, batch: Batch) -> None:
        """Write the files from what the shards hold and commit; repeatable, since a lost race leaves nothing."""
        async with AsyncExitStack() as stack:
            output = ResultFile(self._storage, stack, "output")
            errors = ResultFile(self._storage, stack, "error")
            answered = bytearray(batch.total)
            tally = Tally()
            async for answer in self._answers(batch):
                if answered[answer.request]:
                    continue
                answered[answer.request] = 1
                tally.add(answer.usage)
                await (output if answer.ok else errors).add(bytes(answer.line))
            missing = batch.total - sum(answered)
            ending, reason = self._ending(batch, missing)
            if missing:
                async for line in self._unanswered(batch, answered, reason):
                    await errors.add(line)
        await self._commit(batch, ending, output, errors, tally)

    def _ending(self, batch: Batch, missing: int) -> tuple[BatchStatus, tuple[str, str]]:
        if batch.status == BatchStatus.CANCELLING:
            return BatchStatus.CANCELLED, CANCELLED
        if missing and batch.expires_at <= self._clock():
            return BatchStatus.EXPIRED, EXPIRED
        if missing:
            log.error("answers are missing", batch=batch.id, missing=missing)
        return BatchStatus.COMPLETED, LOST

    async def _answers(self, batch: Batch) -> AsyncIterator[Answer]:
        async with self._database.read() as session:
            slices = (
                await session.scalars(
                    select(SliceBatch.slice_id).where(SliceBatch.batch_id == batch.id).order_by(SliceBatch.slice_id)
                )
            ).all()
        for slice_id in slices:
            async for answer in Shard(self._storage, slice_id).answers():
                if answer.batch_id == batch.id:
                    yield answer

    async def _unanswered(self, batch: Batch, answered: bytearray, reason: tuple[str, str]) -> AsyncIterator[bytes]:
        """An error line for each request that has no answer, from the input file."""
        code, message = reason
        number = 0
        async for offset, raw in self._storage.lines(f"files/{batch.input_file_id}", self._settings.max_line_bytes):
            text = raw.removeprefix(b"\xef\xbb\xbf") if offset == 0 else raw
            if not text.strip():
                continue
            if not answered[number]:
                yield msgspec.json.encode(
                    {
                        "id": ids.batch_request_id(),
                        "custom_id": _custom_id.decode(text).custom_id,
                        "response": None,
                        "error": {"code": code, "message": message},
                    }
                )
            number += 1

    async def _commit(
        self, batch: Batch, ending: BatchStatus, output: ResultFile, errors: ResultFile, tally: Tally
    ) -> None:
        now = self._clock()
        values: dict[str, Any] = {
            "completed": output.lines,
            "failed": errors.lines,
            "input_tokens": tally.input,
            "cached_tokens": tally.cached,
            "output_tokens": tally.output,
            "reasoning_tokens": tally.reasoning,
        }
        try:
            async with self._database.write() as session:
                for name, file in (("output_file_id", output), ("error_file_id", errors)):
                    if file.lines:
                        session.add(file.row(batch, int(now)))
                        values[name] = file.id
                if not await move_batch(session, batch.id, ending, now=now, **values):
                    raise EndedElsewhere(batch.id)
        except BaseException as error:
            for file in (output, errors):
                await self._storage.delete(f"files/{file.id}")
            if isinstance(error, EndedElsewhere):
                return
            raise
        log.info("ended", batch=batch.id, status=ending, completed=output.lines, failed=errors.lines)
        await self._clean_up(batch)

    async def _clean_up(self, batch: Batch) -> None:
        """Delete what only the running batch needed; shards and plans stay while another batch shares them."""
        await self._storage.delete_all(f"batches/{batch.id}")
        async with self._database.read() as session:
            mine = select(SliceBatch.slice_id).where(SliceBatch.batch_id == batch.id)
            shared = (
                select(SliceBatch.slice_id)
                .join(Batch, Batch.id == SliceBatch.batch_id)
                .where(Batch.status.not_in(TERMINAL))
            )
            slices = (await session.scalars(select(Slice.id).where(Slice.id.in_(mine), Slice.id.not_in(shared)))).all()
            windows = select(Slice.window_id).where(Slice.id.in_(mine))
            busy = select(Slice.window_id).where(Slice.id.in_(shared))
            plans = (
                await session.scalars(select(Window.plan_id).where(Window.id.in_(windows), Window.id.not_in(busy)))
            ).all()
        for slice_id in slices:
            await Shard(self._storage, slice_id).delete()
        for plan_id in plans:
            await PlanArtifact(self._storage, plan_id).delete()
        await self._progress.forget(batch.id)
