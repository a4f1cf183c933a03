"""The sweeper: deletes objects that no batch needs any more, leftovers of crashes, and old database records."""

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import structlog
from sqlalchemy import ColumnElement, delete, exists, false, func, select, update

from service.db.clock import DAY_S
from service.db.moves import LIVE, rows_changed
from service.db.sessions import Database
from service.db.tables import (
    Batch,
    File,
    LengthProfile,
    Slice,
    SliceBatch,
    Upload,
    UploadPart,
    UploadStatus,
    WebhookDelivery,
    WebhookEndpoint,
    Window,
)
from service.db.tenant_tables import AuditEvent
from service.objects.plan_artifact import PlanArtifact
from service.objects.storage import Storage, file_key

YOUNG_S = 3600.0  # a file that was deleted is kept so long, for those who download it
# What ended batches leave is kept for a day: people look at how a batch ran, and a database that loses its last
# commits, by a failover or from a backup, may have to end batches once more. So is an object that no row refers to: its
# row may be about to be committed, or may come back.
KEEP_S = DAY_S
KEEP_ROWS_S = 90 * DAY_S
CHUNK = 500  # names per query
KEEP_DELIVERIES_S = 30 * DAY_S  # webhook deliveries that were delivered or abandoned
KEEP_AUDIT_S = 400 * DAY_S
KEEP_LENGTHS_S = 90 * DAY_S  # profiles of answers' lengths to which no batch has added since
WINDOWS = 20  # deleted in one transaction
LIST_S = 3600.0  # between two listings of all that is in object storage
log = structlog.get_logger()

Judge = Callable[[list[str]], Awaitable[tuple[set[str], set[str]]]]
_KEPT = File.deleted_at.is_(None)
_HAS_RESULTS = exists().where(File.id.in_([Batch.output_file_id, Batch.error_file_id]), _KEPT)


class Sweeper:
    """Deletes what the service no longer needs, from object storage and from the database.

    In each round it looks at what only running batches and pending uploads have; at all else in the first one and then
    once an hour, because a listing of object storage costs the more the more is kept.

    `newest_backup`: a file as old as the newest backup of the database; what ended after it is kept. `keep_rows_s`:
    after this time the rows of what was deleted are deleted too, and of batches that ended and have no more files.
    """

    def __init__(
        self,
        database: Database,
        storage: Storage,
        clock: Callable[[], float],
        newest_backup: Path | None = None,
        keep_rows_s: float = KEEP_ROWS_S,
    ) -> None:
        self._keep_rows_s = keep_rows_s
        self._database = database
        self._storage = storage
        self._clock = clock
        self._newest_backup = newest_backup
        self._since = 0.0  # batches that ended since then keep what they have
        self._listed_at: float | None = None

    async def run_once(self) -> bool:
        """Sweep what it is time for. Returns whether it deleted any objects."""
        await self._texts()
        try:
            backup = float("inf") if self._newest_backup is None else self._newest_backup.stat().st_mtime
        except OSError as error:
            log.warning("sweeps nothing: BATCHWEAVE_NEWEST_BACKUP names no file", error=repr(error))
            return False
        now, store_now = self._clock(), await self._storage.now()
        self._since, young = min(now - KEEP_S, backup), min(store_now - KEEP_S, backup)
        swept = await self._folders({"indexes": self._indexes, "uploads": self._uploads}, young)
        if self._listed_at is None or not 0 <= now - self._listed_at < LIST_S:
            self._listed_at = now  # also if it fails: another try would list all of it again
            kept = {"shards": self._shards, "plans": self._plans, "outcomes": self._outcomes}
            swept += await self._folders(kept, young)
            swept += await self._files(store_now, young)
            swept += await self._storage.delete_staged(store_now - YOUNG_S)
            await self._records()
            await self._rows()
            await self._slices()
        if swept:
            log.info("swept", folders=swept)
        return swept > 0

    async def _folders(self, judges: Mapping[str, Judge], young: float) -> int:
        """Delete the folders below these prefixes that nothing needs. Returns how many."""
        swept = 0
        for prefix, judge in judges.items():
            names = await self._storage.folders(prefix)
            for at in range(0, len(names), CHUNK):
                chunk = names[at : at + CHUNK]
                known, needed = await judge(chunk)
                for name in set(chunk) - needed:
                    swept += await self._sweep(f"{prefix}/{name}", name in known, young)
        return swept

    async def _records(self) -> None:
        """Delete old webhook deliveries, audit events and profiles of lengths."""
        now = self._clock()
        ended = WebhookDelivery.next_at.is_(None) & (WebhookDelivery.created_at < now - KEEP_DELIVERIES_S)
        async with self._database.write() as session:
            await session.execute(delete(WebhookDelivery).where(ended))
            await session.execute(delete(AuditEvent).where(AuditEvent.at < now - KEEP_AUDIT_S))
            await session.execute(delete(LengthProfile).where(LengthProfile.seen_at < now - KEEP_LENGTHS_S))

    async def _texts(self) -> None:
        """Delete the texts in pictures of plans with requests of a deleted file or batch."""
        async with self._database.read() as session:
            wanted = select(Window.id, Window.plan_id).where(Window.texts.is_(False)).limit(CHUNK)
            found = (await session.execute(wanted)).all()
        for window_id, plan_id in found:
            try:
                await PlanArtifact(self._storage, plan_id).delete_texts()
            except OSError:  # the next round tries it again
                log.exception("texts not deleted", plan=plan_id)
                continue
            async with self._database.write() as session:
                await session.execute(update(Window).where(Window.id == window_id).values(texts=None))

    async def _rows(self) -> None:
        """Delete rows of batches without files that ended long ago, and of what was deleted long ago."""
        before = int(self._clock() - self._keep_rows_s)
        for table, which in (
            (Batch, (Batch.ended_at < before) & ~_HAS_RESULTS),  # deleted ones have none
            (File, File.deleted_at < before),
            (WebhookEndpoint, WebhookEndpoint.deleted_at < before),
        ):
            deleted = CHUNK
            while deleted == CHUNK:
                some = select(table.seq).where(which).order_by(table.seq).limit(CHUNK)
                async with self._database.write() as session:
                    deleted = rows_changed(await session.execute(delete(table).where(table.seq.in_(some))))
        old_upload = (Upload.status != UploadStatus.PENDING) & (Upload.created_at < before)
        async with self._database.write() as session:
            parts = UploadPart.upload_id.in_(select(Upload.id).where(old_upload))
            await session.execute(delete(UploadPart).where(parts))
            await session.execute(delete(Upload).where(old_upload))

    async def _slices(self) -> None:
        """Delete the windows, with their slices, whose batches all ended long ago."""
        long_ago = Batch.ended_at < self._since
        of_window = SliceBatch.slice_id.in_(select(Slice.id).where(Slice.window_id == Window.id))
        wanted = exists().where(of_window, Batch.id == SliceBatch.batch_id, ~func.coalesce(long_ago, false()))
        oldest = select(Window.id).where(Window.created_at < self._since).order_by(Window.id)
        deleted = WINDOWS
        while deleted == WINDOWS:
            async with self._database.read() as session:
                windows = (await session.scalars(oldest.where(~wanted).limit(WINDOWS))).all()
            deleted = len(windows)
            mine = select(Slice.id).where(Slice.window_id.in_(windows))
            async with self._database.write() as session:
                await session.execute(delete(SliceBatch).where(SliceBatch.slice_id.in_(mine)))
                await session.execute(delete(Slice).where(Slice.window_id.in_(windows)))
                await session.execute(delete(Window).where(Window.id.in_(windows)))

    def _lately(self) -> ColumnElement[bool]:
        """Return the condition that a batch needs what it has in object storage."""
        return Batch.status.in_(LIVE) | (Batch.ended_at >= self._since)

    async def _sweep(self, folder: str, known: bool, young: float) -> bool:
        """Delete a folder that is not needed. Returns whether it did. One that no row refers to must be old."""
        try:
            if not known:
                newest = max((await self._storage.modified(folder)).values(), default=0.0)
                if newest > young:
                    return False
            await self._storage.delete_all(folder)
        except Exception:  # it must not keep the others: the next listing finds it again
            log.exception("not swept", folder=folder)
            return False
        return True

    async def _shards(self, names: list[str]) -> tuple[set[str], set[str]]:
        """Return the names that rows refer to and those that batches need. The other kinds do the same."""
        ids = [int(name) for name in names if name.isdigit()]
        async with self._database.read() as session:
            known = await session.scalars(select(Slice.id).where(Slice.id.in_(ids)))
            needed = await session.scalars(
                select(SliceBatch.slice_id)
                .join(Batch, Batch.id == SliceBatch.batch_id)
                .where(
                    SliceBatch.slice_id.in_(ids),
                    Batch.status.in_(LIVE) | ((Batch.ended_at >= self._since) & _HAS_RESULTS),
                )
            )
            return {str(each) for each in known}, {str(each) for each in needed}

    async def _indexes(self, names: list[str]) -> tuple[set[str], set[str]]:
        async with self._database.read() as session:
            known = await session.scalars(select(Batch.index_id).where(Batch.index_id.in_(names)))
            # An index can be written again from the file, and holds the prompts: it goes with its batch.
            live = Batch.index_id.in_(names) & Batch.status.in_(LIVE)
            needed = await session.scalars(select(Batch.index_id).where(live))
            return {str(each) for each in known}, {str(each) for each in needed}

    async def _plans(self, names: list[str]) -> tuple[set[str], set[str]]:
        async with self._database.read() as session:
            known = await session.scalars(select(Window.plan_id).where(Window.plan_id.in_(names)))
            needed = await session.scalars(
                select(Window.plan_id)
                .join(Slice, Slice.window_id == Window.id)
                .join(SliceBatch, SliceBatch.slice_id == Slice.id)
                .join(Batch, Batch.id == SliceBatch.batch_id)
                .where(Window.plan_id.in_(names), self._lately())
            )
            return set(known), set(needed)

    async def _outcomes(self, names: list[str]) -> tuple[set[str], set[str]]:
        has_answers = exists().where(File.id == Batch.output_file_id, _KEPT)
        async with self._database.read() as session:
            known = await session.scalars(select(Batch.id).where(Batch.id.in_(names)))
            wanted = Batch.id.in_(names) & (Batch.status.in_(LIVE) | has_answers)
            needed = await session.scalars(select(Batch.id).where(wanted))
            return set(known), set(needed)

    async def _uploads(self, names: list[str]) -> tuple[set[str], set[str]]:
        async with self._database.read() as session:
            rows = await session.execute(select(Upload.id, Upload.status).where(Upload.id.in_(names)))
            by_name = {str(upload_id): status for upload_id, status in rows}
        return set(by_name), {name for name, status in by_name.items() if status == UploadStatus.PENDING}

    async def _files(self, store_now: float, young: float) -> int:
        """Delete files whose row is marked deleted, or was never committed. Returns how many."""
        swept = 0
        async for page in self._storage.pages("files"):
            old = {key.rsplit("/", 1)[-1]: at for key, at in page.items() if at <= store_now - YOUNG_S}
            async with self._database.read() as session:
                rows = await session.execute(select(File.id, File.deleted_at).where(File.id.in_(old)))
            deleted = {str(file_id): deleted_at is not None for file_id, deleted_at in rows}
            for file_id in (each for each, at in old.items() if deleted.get(each, at <= young)):
                try:
                    await self._storage.delete(file_key(file_id))
                    swept += 1
                except Exception:
                    log.exception("not swept", file=file_id)
        return swept
