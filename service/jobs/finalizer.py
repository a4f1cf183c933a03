"""The finalizer: merges shards into the output and error files, one line per custom_id, and finishes the batch."""

import time
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec
import numpy as np
import structlog
from numpy.typing import NDArray
from sqlalchemy import delete, exists, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from engine_ext.plan.buckets import LONGEST
from service import ids
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
    fixed,
)
from service.estimates.length_memory import remember
from service.jobs.digest import Digest
from service.jobs.fair_turns import FairDesk
from service.jobs.input_order import InputOrder
from service.metrics import tracing
from service.metrics.counters import BATCHES_ENDED
from service.objects.early_results import RUNS_AT_ONCE, answers_of, early_runs, run_sizes
from service.objects.request_index import Records, RequestIndex
from service.objects.shards import Answer, Shard
from service.objects.storage import Storage, Writer, file_key
from service.queue.counts import Counts
from service.requests.lines import custom_id_of

READ_REQUESTS, READ_BYTES = 1000, 16 * 1024 * 1024
ROUND = 64  # batches fetched per query
SETTLE_S = 3.0  # a worker notices within 1 s that a batch has ended, and writes its answers 0.5 s later
REMEMBERED = 10_000
EXPIRED = ("batch_expired", "This request could not be executed before the completion window expired.")
CANCELLED = ("batch_cancelled", "This request was not executed because the batch was cancelled.")
LOST = ("server_error", "The service has no answer for this request. Submit it again.")
log = structlog.get_logger()

_ENDS = Batch.status.in_([BatchStatus.FINALIZING, BatchStatus.CANCELLING])


class EndedElsewhere(Exception):
    """Another finalizer finished the batch first, or it was cancelled. The other's rows stand, ours roll back."""


@dataclass(slots=True)
class ResultFile:
    """Writes an output or error file. The object is created only with the first line."""

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
    """Finishes batches whose requests are all done, expired or cancelled."""

    def __init__(
        self,
        database: Database,
        storage: Storage,
        clock: Callable[[], float],
    ) -> None:
        self._database = database
        self._storage = storage
        self._clock = clock
        self._desk = FairDesk("finalizer", database, clock)
        self._since: OrderedDict[str, float] = OrderedDict()  # by batch: first seen ending while leased

    async def run_once(self) -> bool:
        """Finish one batch that can be finished. Returns whether it found one. Projects take turns by weight."""
        await self._begin_finished()
        async with self._desk.take(_ENDS, self._first) as taken:
            if taken is not None:
                with tracing.stage("finalize", [taken.batch_id]):
                    async with self._database.read() as session:
                        batch = (await session.scalars(select(Batch).where(Batch.id == taken.batch_id))).one()
                    taken.work += batch.total
                    await self.finalize(batch)
                self._since.pop(taken.batch_id, None)
        return taken is not None

    async def _first(self, project_id: str) -> Sequence[str]:
        leased = exists().where(SliceBatch.batch_id == Batch.id, SliceBatch.status == fixed(SliceStatus.LEASED))
        mine = select(Batch.id, leased).where(Batch.project_id == project_id, _ENDS)
        async with self._database.read() as session:
            found = (await session.execute(mine.order_by(Batch.seq).limit(self._desk.enough + ROUND))).all()
        return [batch_id for batch_id, is_leased in found if not is_leased or self._is_settled(batch_id)]

    def _is_settled(self, batch_id: str) -> bool:
        """Return whether workers that still hold a part of the batch have had time to stop answering its requests.

        They keep answering for a moment after a cancel. Those answers are counted, so they must be in the files.
        """
        since = self._since.setdefault(batch_id, time.monotonic())
        if len(self._since) > REMEMBERED:
            self._since.popitem(last=False)
        return time.monotonic() - since >= SETTLE_S

    async def _begin_finished(self) -> None:
        """Move to finalizing the batches whose requests are all planned and whose slices are all done."""
        is_done = (
            (Batch.status == fixed(BatchStatus.IN_PROGRESS))
            & (Batch.slices_left == fixed(0))
            & (Batch.planned == Batch.total)
        )
        async with self._database.read() as session:
            finished = (await session.scalars(select(Batch.id).where(is_done).order_by(Batch.seq).limit(ROUND))).all()
        if finished:
            async with self._database.write() as session:
                for batch_id in finished:
                    await move_batch(session, batch_id, BatchStatus.FINALIZING, now=self._clock())

    async def finalize(self, batch: Batch) -> None:
        """Write the files from the shards and commit. Safe to repeat: a lost race leaves nothing behind."""
        async with AsyncExitStack() as stack:
            output = ResultFile(self._storage, stack, "output")
            errors = ResultFile(self._storage, stack, "error")
            in_order = None
            if batch.output_order == OutputOrder.INPUT:
                in_order = stack.enter_context(InputOrder(batch.total))
            answered, tokens = bytearray(batch.total), np.zeros(batch.total, dtype=np.int32)
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
                answered[answer.request], tokens[answer.request] = 1, min(answer.usage.output, LONGEST)
                counts += Counts.of(answer)
                await keep(answer.request, bytes(answer.line), answer.ok)
            missing = batch.total - sum(answered)
            ending, reason = self._ending(batch, missing)
            async for request, line in self._unanswered(batch, answered, reason):
                await keep(request, line, False)
            for line, ok in in_order.lines() if in_order else ():
                await (output if ok else errors).add(line)
        if await self._commit(batch, ending, output, errors, counts, digest):
            await self._remember(batch, ending, tokens)

    async def _remember(self, batch: Batch, ending: BatchStatus, tokens: NDArray[np.int32]) -> None:
        """Learn the lengths of the answers; those of a batch that ended early would be the short ones."""
        if ending != BatchStatus.COMPLETED:
            return
        try:
            await remember(self._database, self._storage, batch, tokens, self._clock())
        except Exception:  # the batch has ended; a lesson that is lost costs nobody an answer
            log.exception("lengths not remembered", batch=batch.id)

    def _ending(self, batch: Batch, missing: int) -> tuple[BatchStatus, tuple[str, str]]:
        if batch.status == BatchStatus.CANCELLING:
            return BatchStatus.CANCELLED, CANCELLED
        if missing and batch.expires_at <= self._clock():
            return BatchStatus.EXPIRED, EXPIRED
        if missing:
            log.error("answers are missing", batch=batch.id, missing=missing)
        return BatchStatus.COMPLETED, LOST

    async def _answers(self, batch: Batch) -> AsyncIterator[Answer]:
        """Yield all answers, those that were readable while the batch ran first. A request may come twice."""
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
                except FileNotFoundError:  # the service did not delete it; its requests end without an answer
                    log.exception("segment is missing", batch=batch.id, slice=run.slice_id)
        for slice_id in slices:
            shard = Shard(self._storage, slice_id)
            rest = [name for name in await shard.segments() if name not in read[slice_id]]
            async for answer in shard.answers(rest):
                if answer.batch_id == batch.id:
                    yield answer

    async def _unanswered(
        self, batch: Batch, answered: bytearray, reason: tuple[str, str]
    ) -> AsyncIterator[tuple[int, bytes]]:
        """Yield the number and error line of each unanswered request. The custom_ids come from the input file."""
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
        """Return the records' custom_ids; all None if the input file is missing, so that the batch can still finish."""
        names: list[str | None] = []
        offsets, lengths = records["offset"].tolist(), records["length"].tolist()
        try:
            for first, after in _by_bytes(lengths, READ_BYTES):
                key = file_key(batch.input_file_id)
                lines = await self._storage.read_ranges(key, offsets[first:after], lengths[first:after])
                names += map(_name_of, lines)
        except FileNotFoundError:
            log.exception("input file is missing", batch=batch.id, file=batch.input_file_id)
            return [None] * len(records)
        return names

    async def _commit(
        self,
        batch: Batch,
        ending: BatchStatus,
        output: ResultFile,
        errors: ResultFile,
        counts: Counts,
        digest: Digest,
    ) -> bool:
        """End the batch. Returns whether it was this process that did."""
        now = self._clock()
        values: dict[str, Any] = {
            **asdict(counts),
            "completed": output.lines,
            "failed": errors.lines,  # includes requests without an answer
            "causes": digest.causes or None,
        }
        try:
            async with self._database.write() as session:
                # Slices before batches, as workers lock them when they finish a slice.
                await _let_slices_go(session, batch.id)
                for name, file in (("output_file_id", output), ("error_file_id", errors)):
                    if file.lines:
                        session.add(file.row(batch, int(now)))
                        values[name] = file.id
                if not await move_batch(session, batch.id, ending, now=now, **values):
                    raise EndedElsewhere(batch.id)
                await session.execute(delete(EarlyRun).where(EarlyRun.batch_id == batch.id))
        except EndedElsewhere:
            # Only this error makes it certain that no row names these files; after any other, the sweeper decides.
            for file in (output, errors):
                await self._storage.delete(file_key(file.id))
            return False
        BATCHES_ENDED.labels(ending.value).inc()
        tracing.batch_ended(batch.id, ending, batch.created_at, now)
        log.info("ended", batch=batch.id, status=ending, completed=output.lines, failed=errors.lines)
        return True


def _by_bytes(lengths: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Yield ranges [first, after) of at most `most` bytes each; a larger item is a range by itself."""
    first = size = 0
    for at, length in enumerate(lengths):
        if size + length > most and at > first:
            yield first, at
            first, size = at, 0
        size += length
    if lengths:
        yield first, len(lengths)


def _name_of(line: bytes) -> str | None:
    """Return the line's custom_id; None for an unreadable line, which must not keep its batch from finishing."""
    try:
        return custom_id_of(line)
    except (msgspec.DecodeError, RecursionError):
        log.exception("cannot read a line of the input file")
        return None


async def _let_slices_go(session: AsyncSession, batch_id: str) -> None:
    """Mark the batch's remaining slices done, except those that also hold requests of another live batch."""
    mine = select(SliceBatch.slice_id).where(SliceBatch.batch_id == batch_id)
    shared = (
        select(SliceBatch.slice_id)
        .join(Batch, Batch.id == SliceBatch.batch_id)
        .where(Batch.status.in_(LIVE), Batch.id != batch_id)
    )
    locked = select(Slice.id).where(Slice.id.in_(mine), Slice.status != SliceStatus.DONE).order_by(Slice.id)
    await session.execute(locked.with_for_update())
    await session.execute(
        update(Slice)
        .where(Slice.id.in_(mine), Slice.status != SliceStatus.DONE, Slice.id.not_in(shared))
        .values(status=SliceStatus.DONE, owner=None, lease_until=None)
    )
    done = select(Slice.id).where(Slice.status == SliceStatus.DONE, Slice.id.in_(mine))
    left = SliceBatch.slice_id.in_(done) & (SliceBatch.status != SliceStatus.DONE)
    await session.execute(update(SliceBatch).where(left).values(status=SliceStatus.DONE))
