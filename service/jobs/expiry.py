"""Expiry: ends batches whose completion window has closed, with the answers they have, and deletes expired files."""

from collections.abc import Callable, Sequence
from typing import Any

import structlog
from sqlalchemy import exists, select, text, update
from sqlalchemy.orm import aliased

from service.db.deletions import forget_file
from service.db.moves import LIVE, move_batch, rows_changed
from service.db.sessions import Database
from service.db.tables import Batch, BatchStatus, File, Upload, UploadStatus
from service.metrics import tracing
from service.metrics.counters import BATCHES_ENDED
from service.objects.storage import Storage, file_key
from service.tenants.quotas import hold

ROUND = 1000  # rows fetched per query
log = structlog.get_logger()

_CLOSES = text("batches.status IN ('validating', 'in_progress')")  # worded like the index, so that the database uses it
_NEXT = {BatchStatus.VALIDATING: BatchStatus.EXPIRED, BatchStatus.IN_PROGRESS: BatchStatus.FINALIZING}


class Expiry:
    """Ends late batches and uploads, and deletes expired files."""

    def __init__(self, database: Database, storage: Storage, clock: Callable[[], float]) -> None:
        self._database = database
        self._storage = storage
        self._clock = clock

    async def run_once(self) -> int:
        """Move on batches whose window has closed, expire uploads, delete expired files. Returns how many in total."""
        now = self._clock()
        if not await self._is_something_due(now):
            return 0
        late = await self._late(now)
        for batch_id, status, created_at in late:
            async with self._database.write() as session:
                late_still = Batch.expires_at <= now  # starting a held batch moves its deadline
                moved = await move_batch(session, batch_id, _NEXT[BatchStatus(status)], now=now, only_if=late_still)
            if not moved:
                continue
            if status == BatchStatus.VALIDATING:
                BATCHES_ENDED.labels(BatchStatus.EXPIRED.value).inc()
                tracing.batch_ended(batch_id, BatchStatus.EXPIRED, created_at, now)
            log.info("completion window closed", batch=batch_id)
        return len(late) + await self._end_uploads(now) + await self._delete_files(now)

    async def _is_something_due(self, now: float) -> bool:
        """Return whether anything is due; one cheap query, since it runs every few seconds."""
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
        """Expire uploads that were not completed in time; the sweeper deletes their parts. Returns how many."""
        late = (Upload.status == UploadStatus.PENDING) & (Upload.expires_at <= now)
        async with self._database.read() as session:
            if (await session.scalars(select(Upload.id).where(late).limit(1))).one_or_none() is None:
                return 0
        async with self._database.write() as session:
            return rows_changed(await session.execute(update(Upload).where(late).values(status=UploadStatus.EXPIRED)))

    async def _delete_files(self, now: float) -> int:
        """Delete expired files that no live batch uses, their rows first. Returns how many were due.

        A crash in between leaves an object that no row names, never a file without its bytes.
        """
        in_use = exists().where(Batch.input_file_id == File.id, Batch.status.in_(LIVE))
        # With a retry that runs, it is a result file of the batch of which the retry takes names.
        source, retry = aliased(Batch), aliased(Batch)
        made = (source.error_file_id == File.id) | (source.output_file_id == File.id)
        in_use |= (
            exists()
            .where(made, retry.input_file_id == source.input_file_id)
            .where(retry.retry_of == source.id, retry.status.in_(LIVE))
            .correlate(File)
        )
        late = (
            select(File.id, File.project_id)
            .where(File.expires_at <= now, File.deleted_at.is_(None), ~in_use)
            .limit(ROUND)
        )
        async with self._database.read() as session:
            gone = (await session.execute(late)).all()
        for file_id, project_id in gone:
            async with self._database.write(project_id) as session:
                await hold(session, project_id)
                # A batch may have been created with it since the query.
                gone_now = await forget_file(session, ~in_use, file_id, now)
            if gone_now:
                await self._storage.delete(file_key(file_id))
        return len(gone)
