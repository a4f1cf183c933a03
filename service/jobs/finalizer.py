"""The finalizer: joins shards into the output and error files, one line per custom_id, and ends the batch."""

from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec
import structlog
from sqlalchemy import delete, exists, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from service import ids, tracing
from service.db.moves import LIVE, move_batch
from service.db.sessions import Database
from service.db.tables import (
    FILE_KEEP_S,
    Batch,
    BatchStatus,
    EarlyRun,
    File,
    OutputOrder,
    Slice,
    SliceBatch,
    SliceStatus,
)
from service.early_results import RUNS_AT_ONCE, answers_of, early_runs, run_sizes
from service.jobs.desk import Desk
from service.jobs.digest import Digest
from service.jobs.input_order import InputOrder
from service.jobs.lines import custom_id_of
from service.queue.counts import Counts
from service.request_index import Records, RequestIndex
from service.shards import Answer, Shard
from service.storage import Storage, Writer, file_key

READ_REQUESTS = 1000
EXPIRED = ("batch_expired", "This request could not be executed before the completion window expired.")
CANCELLED = ("batch_cancelled", "This request was not executed because the batch was cancelled.")
LOST = ("server_error", "The service has no answer for this request. Submit it again.")
log = structlog.get_logger()


class EndedElsewhere(Exception):
    """Another finalizer ended the batch first, or it was cancelled meanwhile; its rows stand, ours roll back."""


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
            self._writer = await self.stack.enter_async_context(self.storage.writer(file_key(self.id)))
        await self._writer.write(line + b"\n")
        self.size_bytes += len(line) + 1
        self.lines += 1

    def row(self, batch: Batch, now: int) -> File:
        keep_s = FILE_KEEP_S if batch.output_expires_after_s is None else batch.output_expires_after_s
        return File(
            id=self.id,
            project_id=batch.project_id,
            purpose="batch_output",
            filename=f"{batch.id}_{self.kind}.jsonl",
            size_bytes=self.size_bytes,
            created_at=now,
            expires_at=now + keep_s,
        )


class Finalizer:
    def __init__(
        self,
        database: Database,
        storage: Storage,
        clock: Callable[[], float],
    ) -> None:
        self._database = database
        self._storage = storage
        self._clock = clock
        self._desk = Desk("finalizer", clock)

    async def run_once(self) -> bool:
        """End one batch that can end; whether there was one."""
        await self._begin_finished()
        async with self._database.read() as session:
            ending = (
                await session.scalars(
                    select(Batch)
                    .where(Batch.status.in_([BatchStatus.FINALIZING, BatchStatus.CANCELLING]))
                    .order_by(Batch.seq)
                )
            ).all()
        by_id = {batch.id: batch for batch in ending}
        async with self._desk.take(by_id) as batch_id:
            if batch_id is not None:
                with tracing.stage("finalize", [batch_id]):
                    await self.finalize(by_id[batch_id])
        return batch_id is not None

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
            in_order = None
            if batch.output_order == OutputOrder.INPUT:
                in_order = stack.enter_context(InputOrder(batch.total))
            answered = bytearray(batch.total)
            counts, digest = Counts(), Digest()

            async def keep(request: int, line: bytes, ok: bool) -> None:
                if not ok:
                    digest.add(line)
                if in_order is None:
                    await (output if ok else errors).add(line)
                else:
                    in_order.add(request, line, ok)

            async for answer in self._answers(batch):
                if answered[answer.request]:
                    continue
                answered[answer.request] = 1
                counts += Counts.of(answer)
                await keep(answer.request, bytes(answer.line), answer.ok)
            missing = batch.total - sum(answered)
            ending, reason = self._ending(batch, missing)
            if missing:
                async for request, line in self._unanswered(batch, answered, reason):
                    await keep(request, line, False)
            for line, ok in in_order.lines() if in_order else ():
                await (output if ok else errors).add(line)
        await self._commit(batch, ending, output, errors, counts, digest)

    def _ending(self, batch: Batch, missing: int) -> tuple[BatchStatus, tuple[str, str]]:
        if batch.status == BatchStatus.CANCELLING:
            return BatchStatus.CANCELLED, CANCELLED
        if missing and batch.expires_at <= self._clock():
            return BatchStatus.EXPIRED, EXPIRED
        if missing:
            log.error("answers are missing", batch=batch.id, missing=missing)
        return BatchStatus.COMPLETED, LOST

    async def _answers(self, batch: Batch) -> AsyncIterator[Answer]:
        """All answers, first those that were readable while the batch ran; a request may come twice."""
        async with self._database.read() as session:
            early = len(await run_sizes(session, batch.id))
            slices = (
                await session.scalars(
                    select(SliceBatch.slice_id).where(SliceBatch.batch_id == batch.id).order_by(SliceBatch.slice_id)
                )
            ).all()
        read: dict[int, set[str]] = defaultdict(set)
        for first in range(0, early, RUNS_AT_ONCE):
            async with self._database.read() as session:
                runs = await early_runs(session, batch.id, first, RUNS_AT_ONCE)
            for run in runs:
                read[run.slice_id].update(run.segments)
                try:
                    async for answer in answers_of(self._storage, run):
                        yield answer
                except FileNotFoundError:  # not by us; its requests have no answer then
                    log.exception("segment is gone", batch=batch.id, slice=run.slice_id)
        for slice_id in slices:
            shard = Shard(self._storage, slice_id)
            rest = [name for name in await shard.segments() if name not in read[slice_id]]
            async for answer in shard.answers(rest):
                if answer.batch_id == batch.id:
                    yield answer

    async def _unanswered(
        self, batch: Batch, answered: bytearray, reason: tuple[str, str]
    ) -> AsyncIterator[tuple[int, bytes]]:
        """Number and error line of each request that has no answer, from the input file."""
        code, message = reason
        index = RequestIndex(self._storage, batch.index_id or "")
        for first in range(0, batch.total, READ_REQUESTS):
            count = min(READ_REQUESTS, batch.total - first)
            if all(answered[first : first + count]):
                continue
            numbers = [first + at for at, done in enumerate(answered[first : first + count]) if not done]
            records = (await index.read(first, count))[[number - first for number in numbers]]
            for number, name in zip(numbers, await self._names(batch, records), strict=True):
                line = {
                    "id": ids.batch_request_id(),
                    "custom_id": name,
                    "response": None,
                    "error": {"code": code, "message": message},
                }
                yield number, msgspec.json.encode(line)

    async def _names(self, batch: Batch, records: Records) -> Sequence[str | None]:
        """Their custom_ids; None where the input was removed from the store behind our back, so that batches end."""
        try:
            lines = await self._storage.read_ranges(
                file_key(batch.input_file_id), records["offset"].tolist(), records["length"].tolist()
            )
        except FileNotFoundError:
            log.exception("input file is gone", batch=batch.id, file=batch.input_file_id)
            return [None] * len(records)
        return [custom_id_of(line) for line in lines]

    async def _commit(
        self,
        batch: Batch,
        ending: BatchStatus,
        output: ResultFile,
        errors: ResultFile,
        counts: Counts,
        digest: Digest,
    ) -> None:
        now = self._clock()
        values: dict[str, Any] = {
            **asdict(counts),
            "completed": output.lines,
            "failed": errors.lines,  # those without an answer too
            "causes": digest.causes or None,
        }
        try:
            async with self._database.write() as session:
                for name, file in (("output_file_id", output), ("error_file_id", errors)):
                    if file.lines:
                        session.add(file.row(batch, int(now)))
                        values[name] = file.id
                if not await move_batch(session, batch.id, ending, now=now, **values):
                    raise EndedElsewhere(batch.id)
                await session.execute(delete(EarlyRun).where(EarlyRun.batch_id == batch.id))
                await _let_slices_go(session, batch.id)
        except EndedElsewhere:
            # Only now is it certain that nobody names these files; after any other error the sweeper decides.
            for file in (output, errors):
                await self._storage.delete(file_key(file.id))
            return
        tracing.batch_ended(batch.id, ending, batch.created_at, now)
        log.info("ended", batch=batch.id, status=ending, completed=output.lines, failed=errors.lines)


async def _let_slices_go(session: AsyncSession, batch_id: str) -> None:
    """Mark done what is left of the batch's slices, unless another batch that still runs has requests in them."""
    mine = select(SliceBatch.slice_id).where(SliceBatch.batch_id == batch_id)
    shared = (
        select(SliceBatch.slice_id)
        .join(Batch, Batch.id == SliceBatch.batch_id)
        .where(Batch.status.in_(LIVE), Batch.id != batch_id)
    )
    await session.execute(
        update(Slice)
        .where(Slice.id.in_(mine), Slice.status != SliceStatus.DONE, Slice.id.not_in(shared))
        .values(status=SliceStatus.DONE, owner=None, lease_until=None)
    )
