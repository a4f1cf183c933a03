"""The sweeper: deletes objects that no batch needs any more, leftovers of crashes, and old database records."""

from collections.abc import Callable

import structlog
from sqlalchemy import delete, exists, false, func, select

from service.db.clock import DAY_S
from service.db.moves import LIVE
from service.db.sessions import Database
from service.db.tables import (
    Batch,
    File,
    LengthProfile,
    Slice,
    SliceBatch,
    Upload,
    UploadStatus,
    WebhookDelivery,
    Window,
)
from service.db.tenant_tables import AuditEvent
from service.objects.storage import Storage, file_key

# An object that no row refers to yet may belong to a row that is about to be committed.
YOUNG_S = 3600.0
CHUNK = 500  # names per query
KEEP_DELIVERIES_S = 30 * DAY_S  # webhook deliveries that were delivered or abandoned
KEEP_AUDIT_S = 400 * DAY_S
KEEP_LENGTHS_S = 90 * DAY_S  # profiles of answers' lengths to which no batch has added since
KEEP_SLICES_S = DAY_S  # and plans, of finished batches, so that people can see how a batch ran
WINDOWS = 20  # deleted per round
log = structlog.get_logger()


class Sweeper:
    """Deletes what the service no longer needs, from object storage and from the database."""

    def __init__(self, database: Database, storage: Storage, clock: Callable[[], float]) -> None:
        self._database = database
        self._storage = storage
        self._clock = clock

    async def run_once(self) -> bool:
        """Sweep object storage and the database once. Returns whether it deleted any objects."""
        swept, store_now = 0, await self._storage.now()
        judges = {"shards": self._shards, "indexes": self._indexes, "plans": self._plans, "uploads": self._uploads}
        for prefix, judge in judges.items():
            names = await self._storage.folders(prefix)
            for at in range(0, len(names), CHUNK):
                chunk = names[at : at + CHUNK]
                known, needed = await judge(chunk)
                for name in set(chunk) - needed:
                    swept += await self._sweep(f"{prefix}/{name}", name in known, store_now)
        swept += await self._files(store_now)
        swept += await self._storage.delete_staged(store_now - YOUNG_S)
        await self._records()
        await self._slices()
        if swept:
            log.info("swept", folders=swept)
        return swept > 0

    async def _records(self) -> None:
        """Delete old webhook deliveries, audit events and profiles of lengths."""
        now = self._clock()
        ended = WebhookDelivery.next_at.is_(None) & (WebhookDelivery.created_at < now - KEEP_DELIVERIES_S)
        async with self._database.write() as session:
            await session.execute(delete(WebhookDelivery).where(ended))
            await session.execute(delete(AuditEvent).where(AuditEvent.at < now - KEEP_AUDIT_S))
            await session.execute(delete(LengthProfile).where(LengthProfile.seen_at < now - KEEP_LENGTHS_S))

    async def _slices(self) -> None:
        """Delete the windows, with their slices, whose batches all finished more than KEEP_SLICES_S ago."""
        long_ago = Batch.ended_at < self._clock() - KEEP_SLICES_S
        of_window = SliceBatch.slice_id.in_(select(Slice.id).where(Slice.window_id == Window.id))
        wanted = exists().where(of_window, Batch.id == SliceBatch.batch_id, ~func.coalesce(long_ago, false()))
        oldest = select(Window.id).where(Window.created_at < self._clock() - KEEP_SLICES_S).order_by(Window.id)
        async with self._database.read() as session:
            windows = (await session.scalars(oldest.where(~wanted).limit(WINDOWS))).all()
        for window_id in windows:
            mine = select(Slice.id).where(Slice.window_id == window_id)
            async with self._database.write() as session:
                await session.execute(delete(SliceBatch).where(SliceBatch.slice_id.in_(mine)))
                await session.execute(delete(Slice).where(Slice.window_id == window_id))
                await session.execute(delete(Window).where(Window.id == window_id))

    async def _sweep(self, folder: str, known: bool, store_now: float) -> bool:
        """Delete a folder that is not needed. Returns whether it did.

        A folder that no row refers to is kept while it is young: its row may not be committed yet.
        """
        if not known:
            newest = max((await self._storage.modified(folder)).values(), default=0.0)
            if newest > store_now - YOUNG_S:
                return False
        await self._storage.delete_all(folder)
        return True

    async def _shards(self, names: list[str]) -> tuple[set[str], set[str]]:
        """Return the names that rows refer to and those that live batches need. The other kinds do the same."""
        ids = [int(name) for name in names if name.isdigit()]
        async with self._database.read() as session:
            known = await session.scalars(select(Slice.id).where(Slice.id.in_(ids)))
            needed = await session.scalars(
                select(SliceBatch.slice_id)
                .join(Batch, Batch.id == SliceBatch.batch_id)
                .where(SliceBatch.slice_id.in_(ids), Batch.status.in_(LIVE))
            )
            return {str(each) for each in known}, {str(each) for each in needed}

    async def _indexes(self, names: list[str]) -> tuple[set[str], set[str]]:
        async with self._database.read() as session:
            rows = await session.execute(select(Batch.index_id, Batch.status).where(Batch.index_id.in_(names)))
            by_name = {str(index_id): status for index_id, status in rows}
        return set(by_name), {name for name, status in by_name.items() if status in LIVE}

    async def _plans(self, names: list[str]) -> tuple[set[str], set[str]]:
        lately = Batch.status.in_(LIVE) | (Batch.ended_at >= self._clock() - KEEP_SLICES_S)
        async with self._database.read() as session:
            known = await session.scalars(select(Window.plan_id).where(Window.plan_id.in_(names)))
            needed = await session.scalars(
                select(Window.plan_id)
                .join(Slice, Slice.window_id == Window.id)
                .join(SliceBatch, SliceBatch.slice_id == Slice.id)
                .join(Batch, Batch.id == SliceBatch.batch_id)
                .where(Window.plan_id.in_(names), lately)
            )
            return set(known), set(needed)

    async def _uploads(self, names: list[str]) -> tuple[set[str], set[str]]:
        async with self._database.read() as session:
            rows = await session.execute(select(Upload.id, Upload.status).where(Upload.id.in_(names)))
            by_name = {str(upload_id): status for upload_id, status in rows}
        return set(by_name), {name for name, status in by_name.items() if status == UploadStatus.PENDING}

    async def _files(self, store_now: float) -> int:
        """Delete files whose row was never committed or is marked deleted. Returns how many."""
        modified = await self._storage.modified("files")
        old = [key.rsplit("/", 1)[-1] for key, at in modified.items() if at <= store_now - YOUNG_S]
        swept = 0
        for at in range(0, len(old), CHUNK):
            chunk = old[at : at + CHUNK]
            async with self._database.read() as session:
                kept = set(await session.scalars(select(File.id).where(File.id.in_(chunk), File.deleted_at.is_(None))))
            for file_id in set(chunk) - kept:
                await self._storage.delete(file_key(file_id))
                swept += 1
        return swept
