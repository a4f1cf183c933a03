"""Expiry: when a batch's completion window closes, it ends with what is finished; files go when their time is up."""

from collections.abc import Callable, Sequence
from typing import Any

import structlog
from sqlalchemy import exists, select, text, update

from service.db.moves import LIVE, move_batch, rows_changed
from service.db.sessions import Database
from service.db.tables import Batch, BatchStatus, File, Upload, UploadStatus
from service.metrics import tracing
from service.metrics.counters import BATCHES_ENDED
from service.objects.storage import Storage, file_key

ROUND = 1000  # rows of which one look takes note
log = structlog.get_logger()

_CLOSES = text("batches.status IN ('validating', 'in_progress')")  # as the index says it
_NEXT = {BatchStatus.VALIDATING: BatchStatus.EXPIRED, BatchStatus.IN_PROGRESS: BatchStatus.FINALIZING}


class Expiry:
    def __init__(self, database: Database, storage: Storage, clock: Callable[[], float]) -> None:
        self._database = database
        self._storage = storage
        self._clock = clock

    async def run_once(self) -> int:
        """Move on the batches whose window has closed, and delete expired files; returns how many."""
        now = self._clock()
        if not await self._is_something_due(now):
            return 0
        late = await self._late(now)
        for batch_id, status, created_at in late:
            async with self._database.write() as session:
                late_still = Batch.expires_at <= now  # a start of a held batch moves it
                moved = await move_batch(session, batch_id, _NEXT[BatchStatus(status)], now=now, only_if=late_still)
            if not moved:
                continue
            if status == BatchStatus.VALIDATING:
                BATCHES_ENDED.labels(BatchStatus.EXPIRED.value).inc()
                tracing.batch_ended(batch_id, BatchStatus.EXPIRED, created_at, now)
            log.info("completion window closed", batch=batch_id)
        return len(late) + await self._end_uploads(now) + await self._delete_files(now)

    async def _is_something_due(self, now: float) -> bool:
        """One question, for it is asked every few seconds."""
        due = (
            exists().where(_CLOSES, Batch.expires_at <= now),
            exists().where(Upload.status == UploadStatus.PENDING, Upload.expires_at <= now),
            exists().where(File.expires_at <= now, File.deleted_at.is_(None)),
        )
        async with self._database.read() as session:
            return any((await session.execute(select(*due))).one())

    async def _late(self, now: float) -> Sequence[Any]:
        late = select(Batch.id, Batch.status, Batch.created_at).where(_CLOSES, Batch.expires_at <= now)
        query = late.order_by(Batch.expires_at).limit(ROUND)
        async with self._database.read() as session:
            return (await session.execute(query)).all()

    async def _end_uploads(self, now: float) -> int:
        """Uploads that nobody completed; the sweeper deletes their parts."""
        late = (Upload.status == UploadStatus.PENDING) & (Upload.expires_at <= now)
        async with self._database.read() as session:
            if (await session.scalars(select(Upload.id).where(late).limit(1))).one_or_none() is None:
                return 0
        async with self._database.write() as session:
            return rows_changed(await session.execute(update(Upload).where(late).values(status=UploadStatus.EXPIRED)))

    async def _delete_files(self, now: float) -> int:
        """Rows first: a crash in between leaves an object that nobody can name, never a file without its bytes."""
        in_use = exists().where(Batch.input_file_id == File.id, Batch.status.in_(LIVE))
        late = select(File.id).where(File.expires_at <= now, File.deleted_at.is_(None), ~in_use).limit(ROUND)
        async with self._database.read() as session:
            gone = (await session.scalars(late)).all()
        for file_id in gone:
            async with self._database.write() as session:
                still = (File.id == file_id) & ~in_use  # a batch may have begun with it meanwhile
                gone_now = await session.execute(update(File).where(still).values(deleted_at=int(now)))
            if rows_changed(gone_now):
                await self._storage.delete(file_key(file_id))
        return len(gone)
