"""Makes the answers of a running batch readable, in a stable order: answers once read also come first in its files.

The answers are in the segments of many slices that grow in parallel. The first reader appends the new segments to those
that are already readable, as rows; nothing is copied. The finalizer begins with these rows, so a reader can continue by
byte offset from the first answer to the end of the finished file.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from service.db.sessions import Database
from service.db.tables import Batch, BatchStatus, EarlyRun, Slice, SliceBatch, SliceStatus
from service.objects.shards import Answer, Shard, Told, told
from service.objects.storage import Storage

EVERY_S = 1.0  # between two looks at one batch, however many readers ask
RUNS_A_SECOND = 200  # a batch with n times this many runs is looked at every n seconds, to limit their number
MOST_BYTES = 64 * 1024 * 1024  # of new lines per look
MOST_S = 5.0  # per look; the reader comes back for the rest
RUNS_AT_ONCE = 64  # rows that one reader holds in memory
REMEMBERED = 256  # batches


class Size(NamedTuple):
    """The size of a run: its number, and the bytes of its lines in the output file and in the error file."""

    number: int
    output_bytes: int
    error_bytes: int

    def of(self, ok: bool) -> int:
        return self.output_bytes if ok else self.error_bytes


async def run_sizes(session: AsyncSession, batch_id: str) -> list[Size]:
    """Return the sizes of all runs of a batch, in order."""
    columns = select(EarlyRun.number, EarlyRun.output_bytes, EarlyRun.error_bytes)
    rows = await session.execute(columns.where(EarlyRun.batch_id == batch_id).order_by(EarlyRun.number))
    return [Size(*row) for row in rows]


async def early_runs(session: AsyncSession, batch_id: str, first: int, count: int) -> Sequence[EarlyRun]:
    """Return runs [first, first + count) of a batch."""
    mine = (EarlyRun.batch_id == batch_id) & EarlyRun.number.between(first, first + count - 1)
    return (await session.scalars(select(EarlyRun).where(mine).order_by(EarlyRun.number))).all()


async def answers_of(storage: Storage, run: EarlyRun, gone: list[str] | None = None) -> AsyncIterator[Answer]:
    """Yield the run's answers that no earlier run has, with one segment in memory at a time.

    `gone`: gets the keys of segments that are not there; without it they raise FileNotFoundError.
    """
    had = set(run.repeats)
    async for answer in Shard(storage, run.slice_id).answers(run.segments, at_once=1, gone=gone):
        if answer.batch_id == run.batch_id and answer.request not in had:
            had.add(answer.request)
            yield answer


@dataclass(slots=True)
class _Known:
    """What is known of a batch: when to look for new answers again, and which slices are fully read."""

    next_at: float = 0.0
    complete: set[int] = field(default_factory=set[int])
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class EarlyResults:
    """Makes new answers readable. Create one per process."""

    def __init__(self, database: Database, storage: Storage, clock: Callable[[], float]) -> None:
        self._database = database
        self._storage = storage
        self._clock = clock
        self._known: OrderedDict[str, _Known] = OrderedDict()

    async def refresh(self, batch_id: str) -> None:
        """Append the new answers to those that are readable. Does nothing once the batch is ending."""
        known = self._known.setdefault(batch_id, _Known())
        self._known.move_to_end(batch_id)
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        async with known.lock:
            if self._clock() >= known.next_at:
                runs = await self._refresh(batch_id, known)
                known.next_at = self._clock() + EVERY_S * max(1.0, runs / RUNS_A_SECOND)

    async def stream(
        self, batch_id: str, sizes: Sequence[Size], ok: bool, start: int, end: int
    ) -> AsyncIterator[bytes]:
        """Yield bytes [start, end) of the output file so far, or of the error file.

        Raises FileNotFoundError when the batch has ended and its segments are gone.
        """
        at = first = 0
        while first < len(sizes) and at + sizes[first].of(ok) <= start:
            at += sizes[first].of(ok)
            first += 1
        while first < len(sizes) and at < end:
            async with self._database.read() as session:
                runs = await early_runs(session, batch_id, first, RUNS_AT_ONCE)
            if not runs:
                raise FileNotFoundError(batch_id)
            first += len(runs)
            for run in runs:
                async for line in self._lines(run, ok):
                    if at < end and at + len(line) > start:
                        yield line[max(0, start - at) : end - at]
                    at += len(line)
                    if at >= end:
                        return

    async def _lines(self, run: EarlyRun, ok: bool) -> AsyncIterator[bytes]:
        async for answer in answers_of(self._storage, run):
            if answer.ok == ok:
                yield bytes(answer.line) + b"\n"

    async def _refresh(self, batch_id: str, known: _Known) -> int:
        """Look for new runs and commit them. Returns how many runs there are."""
        async with self._database.read() as session:
            before = await session.scalar(select(func.count()).where(EarlyRun.batch_id == batch_id)) or 0
            begun = (
                await session.execute(
                    select(Slice.id, Slice.status, Slice.segments, Slice.epoch)
                    .join(SliceBatch, SliceBatch.slice_id == Slice.id)
                    .where(SliceBatch.batch_id == batch_id, Slice.epoch > 0)
                    .order_by(Slice.id)
                )
            ).all()
        found, complete, size, until = list[EarlyRun](), set[int](), 0, time.monotonic() + MOST_S
        for slice_id, status, said, epoch in begun:
            if slice_id in known.complete:
                continue
            if size > MOST_BYTES or time.monotonic() > until:
                break
            gone: list[str] = []
            run = await self._new_run(batch_id, before + len(found), slice_id, told(said, epoch), gone)
            if run is not None:
                found.append(run)
                size += run.output_bytes + run.error_bytes
            if status == SliceStatus.DONE and not gone:
                (known.complete if run is None else complete).add(slice_id)
        if found and await self._commit(batch_id, before, found):
            known.complete |= complete
        return before + len(found)

    async def _new_run(
        self, batch_id: str, number: int, slice_id: int, epochs: Told, gone: list[str]
    ) -> EarlyRun | None:
        """Return a run of the slice's segments that no earlier run has; None if there are none.

        `gone`: gets the keys of those that are not there yet.
        """
        shard = Shard(self._storage, slice_id)
        async with self._database.read() as session:
            mine = (EarlyRun.batch_id == batch_id) & (EarlyRun.slice_id == slice_id)
            read = {name for names in await session.scalars(select(EarlyRun.segments).where(mine)) for name in names}
        segments = await shard.names(epochs, read)
        if not segments:
            return None
        repeats: list[int] = []
        if len({name.split("-")[0] for name in (*read, *segments)}) > 1:  # one epoch answers each request once
            async for answer in shard.answers(sorted(read), at_once=1, gone=[]):
                if answer.batch_id == batch_id:
                    repeats.append(answer.request)
        run = EarlyRun(batch_id=batch_id, number=number, slice_id=slice_id, segments=segments, repeats=repeats)
        run.output_bytes = run.error_bytes = 0
        async for answer in answers_of(self._storage, run, gone):
            if answer.ok:
                run.output_bytes += len(bytes(answer.line)) + 1
            else:
                run.error_bytes += len(bytes(answer.line)) + 1
        missing = {key.rsplit("/", 1)[-1] for key in gone}
        run.segments = [name for name in segments if name not in missing]
        return run if run.segments else None

    async def _commit(self, batch_id: str, before: int, found: list[EarlyRun]) -> bool:
        """Commit the runs. Returns False if another process was first or the batch is ending.

        The finalizer of a batch that is ending may have read the rows already.
        """
        async with self._database.write() as session:
            status = await session.scalar(select(Batch.status).where(Batch.id == batch_id).with_for_update())
            count = select(func.count()).select_from(EarlyRun).where(EarlyRun.batch_id == batch_id)
            if status != BatchStatus.IN_PROGRESS or await session.scalar(count) != before:
                return False
            session.add_all(found)
        return True
