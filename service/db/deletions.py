"""Takes out of the rows what a deleted file or batch said, in the transaction that deletes it.

Names, messages and examples are texts of clients: they go with the file. Ids, times and counts stay for a while. The
caller holds the project's row (`tenants/quotas.py`), so that two deletions never wait for each other.
"""

from typing import Any

from sqlalchemy import ColumnElement, null, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from service.db.moves import rows_changed
from service.db.tables import Batch, BatchStatus, File, Slice, SliceBatch, Upload, Window

GONE = "The file is deleted."  # in place of messages
GONE_ERRORS = [{"code": "file_deleted", "message": GONE, "line": None, "param": None}]


async def forget_file(session: AsyncSession, which: ColumnElement[bool], file_id: str, now: float) -> bool:
    """Mark a file deleted, if `which` holds, with what rows say of it. Returns whether it was there."""
    gone = update(File).where(which, File.id == file_id, File.deleted_at.is_(None))
    if not rows_changed(await session.execute(gone.values(deleted_at=int(now), filename=""))):
        return False
    await session.execute(update(Upload).where(Upload.file_id == file_id).values(filename=""))
    made = select(Batch).where(Batch.error_file_id == file_id).with_for_update()
    for batch in (await session.scalars(made)).all():
        batch.causes = [{**each, "message": GONE, "custom_ids": []} for each in batch.causes or []] or None
    await session.flush()
    # One statement for all batches that ever used the file.
    theirs = update(Batch).where(Batch.input_file_id == file_id)
    await session.execute(theirs.where(Batch.status == BatchStatus.FAILED).values(errors=GONE_ERRORS))
    await session.execute(theirs.values(unknown_parameters=null()))
    await _forget_texts(session, Batch.input_file_id == file_id)
    return True


async def forget_batch(session: AsyncSession, batch: Batch, now: float) -> list[str]:
    """Delete a batch that has ended, and its result files. Returns the ids of the files to delete from the store.

    Its row stays for a while: clients list the batches that follow it, and its idempotency key must not run it again.
    """
    files = [each for each in (batch.output_file_id, batch.error_file_id) if each is not None]
    found = [each for each in files if await forget_file(session, File.project_id == batch.project_id, each, now)]
    await _forget_texts(session, Batch.id == batch.id)
    left = {"custom_metadata": null(), "errors": null(), "causes": null(), "unknown_parameters": null()}
    left |= {"unknown_fields": null()}
    await session.execute(update(Batch).where(Batch.id == batch.id).values(deleted_at=int(now), **left))
    return found


async def _forget_texts(session: AsyncSession, which: ColumnElement[bool]) -> None:
    """Let the pictures of the windows of these batches show no more texts; the sweeper deletes them."""
    mine: Any = select(Slice.window_id).join(SliceBatch, SliceBatch.slice_id == Slice.id)
    windows = Window.id.in_(mine.join(Batch, Batch.id == SliceBatch.batch_id).where(which))
    await forget_texts_of(session, windows)


async def forget_texts_of(session: AsyncSession, windows: ColumnElement[bool]) -> None:
    """Let the pictures of these windows show no more texts. They are locked in order, as projects share them."""
    wanted = select(Window.id).where(windows, Window.texts.is_(True)).order_by(Window.id).with_for_update()
    if ids := (await session.scalars(wanted)).all():
        await session.execute(update(Window).where(Window.id.in_(ids)).values(texts=False))
