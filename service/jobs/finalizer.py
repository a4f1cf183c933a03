"""The finalizer: merges shards into the output and error files, one line per custom_id, and finishes the batch."""

import time
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

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
from service.jobs.again import EndedElsewhere, run_again
from service.jobs.bad_answers import BadAnswers
from service.jobs.digest import Digest
from service.jobs.fair_turns import FairDesk
from service.jobs.input_names import names_of
from service.jobs.input_order import InputOrder
from service.metrics import tracing
from service.metrics.counters import BATCHES_ENDED
from service.objects.early_results import RUNS_AT_ONCE, answers_of, early_runs, run_sizes
from service.objects.json_lines import line_of
from service.objects.shards import Answer, Shard, told
from service.objects.storage import LATE_S, Storage, Writer, file_key
from service.queue.counts import Counts

ROUND = 64  # batches fetched per query
SETTLE_S = 3.0  # a worker notices within 1 s that a batch has ended, and writes its answers 0.5 s later
REMEMBERED = 10_000
LINE_BYTES = 16 * 1024  # of a line of a large batch, on average, as far as it is known before the lines are read
LARGER = 16  # the factor to a file's expected size if the lines turn out to be longer
EXPIRED = ("batch_expired", "This request could not be executed before the completion window expired.")
CANCELLED = ("batch_cancelled", "This request was not executed because the batch was cancelled.")
LOST = ("server_error", "The service has no answer for this request. Submit it again.")
log = structlog.get_logger()

_ENDS = Batch.status.in_([BatchStatus.FINALIZING, BatchStatus.CANCELLING])


class AnswersLate(Exception):
    """Segments that a worker wrote are not there yet. They may come, as their store may be late."""


class FileTooLarge(Exception):
    """A result file has more bytes than its writer was told."""


class AnswersLost(Exception):
    """Requests have no answer though their slices are done, and they can run again."""

    def __init__(self, missing: NDArray[np.int64], counts: Counts) -> None:
        super().__init__(f"{len(missing)} answers")
        self.missing, self.counts = missing, counts


@dataclass(slots=True)
class ResultFile:
    """Writes an output or error file. The object is created only with the first line."""

    storage: Storage
    stack: AsyncExitStack
    kind: str
    most: int  # bytes that it may have, if it is large
    id: str = field(default_factory=ids.file_id)
    size_bytes: int = 0
    lines: int = 0
    _writer: Writer | None = None

    async def add(self, line: bytes) -> None:
        if self._writer is None:
            self._writer = await self.stack.enter_async_context(self.storage.writer(file_key(self.id), self.most))
        self.size_bytes += len(line) + 1
        if self.size_bytes > self.storage.largest(self.most):
            raise FileTooLarge(self.id)
        await self._writer.write(line + b"\n")
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
        # By batch: segments that were not there, and since when; none if nobody has said yet which ones there are.
        self._late: dict[str, tuple[float, list[str]]] = {}

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
            & Batch.index_id.is_not(None)  # one that was lost is written again first, for what must run again
        )
        async with self._database.read() as session:
            finished = (await session.scalars(select(Batch.id).where(is_done).order_by(Batch.seq).limit(ROUND))).all()
        if finished:
            async with self._database.write() as session:
                for batch_id in finished:
                    await move_batch(session, batch_id, BatchStatus.FINALIZING, now=self._clock(), only_if=is_done)

    async def finalize(self, batch: Batch) -> None:
        """Write the files from the shards and commit. Safe to repeat: a lost race leaves nothing behind.

        What has no answer, though its slice is done, runs again. Raises AnswersLate.
        """
        await self._await_late(batch)
        most, is_written = batch.total * LINE_BYTES, False
        try:
            while not is_written:
                try:
                    await self._write_files(batch, most)
                    is_written = True
                except FileTooLarge:  # its parts were too small
                    most *= LARGER
        except AnswersLost as lost:  # what was waited for once is not waited for again
            await run_again(self._database, self._storage, batch, lost.missing, lost.counts, self._clock)
            return
        self._late.pop(batch.id, None)

    async def _await_late(self, batch: Batch) -> None:
        """Raise AnswersLate while segments that were not there are still not there, and may come."""
        since, keys = self._late.get(batch.id, (0.0, []))
        if self._clock() < since + LATE_S:
            if not keys:
                raise AnswersLate("segments that nobody has counted yet")
            for key in keys:
                if not await self._storage.has(key):
                    raise AnswersLate(key)

    async def _write_files(self, batch: Batch, most: int) -> None:
        """Write and commit the result files, each of at most `most` bytes if it is large. Raises FileTooLarge."""
        async with AsyncExitStack() as stack:
            output = ResultFile(self._storage, stack, "output", most)
            errors = ResultFile(self._storage, stack, "error", most)
            in_order = None
            if batch.output_order == OutputOrder.INPUT:
                in_order = stack.enter_context(InputOrder(batch.total))
            answered, tokens = bytearray(batch.total), np.zeros(batch.total, dtype=np.int32)
            counts, digest, bad = Counts(), Digest(), BadAnswers()

            async def keep(request: int, line: bytes, ok: bool) -> None:
                if not ok:
                    digest.add(line)
                if in_order is None:
                    await (output if ok else errors).add(line)
                else:
                    in_order.add(request, line, ok)

            gone, unsaid = list[str](), set[int]()
            async for answer in self._answers(batch, gone, unsaid):
                if answered[answer.request]:
                    continue
                answered[answer.request], tokens[answer.request] = 1, min(answer.usage.answer, LONGEST)
                counts += Counts.of(answer)
                bad.add(answer)
                await keep(answer.request, bytes(answer.line), answer.ok)
            missing = np.flatnonzero(np.frombuffer(answered, dtype=np.uint8) == 0)
            ending, reason = await self._ending(batch, missing, counts, gone, unsaid)
            # What has no answer when a batch ends early was not run.
            counts += Counts(failed=len(missing) if ending == BatchStatus.COMPLETED else 0)
            async for request, name in names_of(self._database, self._storage, batch, missing):
                await keep(request, _no_answer(name, reason), False)
            for line, ok in in_order.lines() if in_order else ():
                await (output if ok else errors).add(line)
        await bad.write(self._storage, batch.id, output.id)
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

    async def _ending(
        self, batch: Batch, missing: NDArray[np.int64], counts: Counts, gone: list[str], unsaid: set[int]
    ) -> tuple[BatchStatus, tuple[str, str]]:
        """Return how the batch ends, and what its requests without an answer are told.

        `gone`: the keys of segments that are not there. `unsaid`: slices that still run, with answers of this batch in
        segments that nobody has counted yet. Raises AnswersLate, AnswersLost.
        """
        runs = batch.status == BatchStatus.FINALIZING and batch.expires_at > self._clock()
        if len(missing) and (gone or (unsaid and runs)):
            since, _ = self._late.setdefault(batch.id, (self._clock(), gone))
            if self._clock() < since + LATE_S:
                raise AnswersLate(f"{len(gone)} segments of {batch.id}, and those of the slices {sorted(unsaid)}")
        if batch.status == BatchStatus.CANCELLING:
            return BatchStatus.CANCELLED, CANCELLED
        if len(missing) and batch.expires_at <= self._clock():
            return BatchStatus.EXPIRED, EXPIRED
        if len(missing):
            # Without an index nobody could plan or run them.
            if batch.index_id is not None and await self._storage.has(file_key(batch.input_file_id)):
                raise AnswersLost(missing, counts)
            log.error("answers are missing, and the input file too", batch=batch.id, missing=len(missing))
        return BatchStatus.COMPLETED, LOST

    async def _answers(self, batch: Batch, gone: list[str], unsaid: set[int]) -> AsyncIterator[Answer]:
        """Yield all answers, those that were readable while the batch ran first. A request may come twice.

        `gone`: gets the keys of segments that are not there. `unsaid`: gets the slices with leases of which nobody has
        said how many segments they have.
        """
        async with self._database.read() as session:
            early = len(await run_sizes(session, batch.id))
            slices = (
                await session.execute(
                    select(Slice.id, Slice.segments, Slice.epoch)
                    .join(SliceBatch, SliceBatch.slice_id == Slice.id)
                    .where(SliceBatch.batch_id == batch.id)
                    .order_by(Slice.id)
                )
            ).all()
        read: dict[int, set[str]] = defaultdict(set)
        for first in range(0, early, RUNS_AT_ONCE):
            async with self._database.read() as session:
                runs = await early_runs(session, batch.id, first, RUNS_AT_ONCE)
            for run in runs:
                read[run.slice_id].update(run.segments)
                async for answer in answers_of(self._storage, run, gone):
                    yield answer
        for slice_id, said, epoch in slices:
            shard, known = Shard(self._storage, slice_id), told(said, epoch)
            if any(count is None for _, count in known):
                unsaid.add(slice_id)
            rest = await shard.names(known, read[slice_id])
            async for answer in shard.answers(rest, gone=gone):
                if answer.batch_id == batch.id:
                    yield answer

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
        values: dict[str, Any] = {**asdict(counts), "causes": digest.causes or None}
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
        log.info("ended", batch=batch.id, status=ending, **asdict(counts))
        return True


def _no_answer(name: str | None, reason: tuple[str, str]) -> bytes:
    """Return the error line of a request without an answer."""
    error = {"code": reason[0], "message": reason[1]}
    return line_of({"id": ids.batch_request_id(), "custom_id": name, "response": None, "error": error})


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
