"""Takes out of the rows what a deleted file or batch said, in the transaction that deletes it.

Names, messages and examples are texts of clients: they go with the file. Ids, times and counts stay for a while.
"""

from typing import Any

from sqlalchemy import ColumnElement, delete, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from service.db.moves import rows_changed
from service.db.tables import Batch, File, Slice, SliceBatch, Upload, Window

GONE = "The file is deleted."  # in place of messages


async def forget_file(session: AsyncSession, which: ColumnElement[bool], file_id: str, now: float) -> bool:
    """Mark a file deleted, if `which` holds, with what rows say of it. Returns whether it was there."""
    gone = update(File).where(which, File.id == file_id, File.deleted_at.is_(None))
    if not rows_changed(await session.execute(gone.values(deleted_at=int(now), filename=""))):
        return False
    await session.execute(update(Upload).where(Upload.file_id == file_id).values(filename=""))
    for batch in (await session.scalars(select(Batch).where(Batch.error_file_id == file_id))).all():
        batch.causes = [{**each, "message": GONE, "custom_ids": []} for each in batch.causes or []] or None
    for batch in (await session.scalars(select(Batch).where(Batch.input_file_id == file_id))).all():
        batch.errors = [{**each, "message": GONE} for each in batch.errors or []] or None
        batch.unknown_parameters = None
        await _forget_texts(session, batch.id)
    await session.flush()
    return True


async def forget_batch(session: AsyncSession, batch: Batch, now: float) -> list[str]:
    """Delete a batch that has ended, and its result files. Returns the ids of the files to delete from the store."""
    files = [each for each in (batch.output_file_id, batch.error_file_id) if each is not None]
    found = [each for each in files if await forget_file(session, File.project_id == batch.project_id, each, now)]
    await _forget_texts(session, batch.id)
    await session.execute(delete(Batch).where(Batch.seq == batch.seq))
    return found


async def _forget_texts(session: AsyncSession, batch_id: str) -> None:
    """Let the pictures of the batch's windows show no more texts; the sweeper deletes them."""
    mine: Any = select(Slice.window_id).join(SliceBatch, SliceBatch.slice_id == Slice.id)
    windows = Window.id.in_(mine.where(SliceBatch.batch_id == batch_id))
    await session.execute(update(Window).where(windows, Window.texts.is_(True)).values(texts=False))
