"""Checks projects' quotas. Usage is counted from the rows themselves, so a batch frees its share when it ends."""

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from service.db.moves import LIVE
from service.db.tables import Batch, BatchStatus, File, Upload, UploadStatus
from service.db.tenant_tables import Project
from service.errors import PayloadTooLarge, QuotaReached

BATCH_RETRY_S = 60  # when it is worth trying again
BYTES_RETRY_S = 3600
FAILED_S, LEAST_FAILED = 3600, 100


async def hold(session: AsyncSession, project_id: str) -> Project:
    """Lock the project's row until the transaction ends, so that two callers cannot both find the last room."""
    return (await session.scalars(select(Project).where(Project.id == project_id).with_for_update())).one()


async def enqueued_tokens(session: AsyncSession, project_id: str) -> int:
    """Return the prompt tokens of the project's unfinished batches."""
    live = select(func.coalesce(func.sum(Batch.prompt_tokens), 0)).where(_live(project_id))
    return int((await session.execute(live)).scalar_one())


async def check_batches(session: AsyncSession, project: Project, default: int, now: float) -> None:
    """Raise QuotaReached if one more batch is too many; this is final only while the project's row is locked (`hold`).

    `default`: the quota of a project that has none of its own.
    """
    most = default if project.max_batches is None else project.max_batches
    live = select(func.count()).select_from(Batch).where(_live(project.id))
    count = int((await session.execute(live)).scalar_one())
    # A batch that fails validation uses no quota, but leaves a row with its errors.
    is_failed = (Batch.status == BatchStatus.FAILED) & (Batch.ended_at > int(now) - FAILED_S)
    failed = select(func.count()).select_from(Batch).where(Batch.project_id == project.id, is_failed)
    failures = int((await session.execute(failed)).scalar_one())
    if failures >= max(most, LEAST_FAILED):
        message = f"{failures} of the project's batches failed validation in the last hour."
        raise QuotaReached(f"{message} Fix the files and try again later.", FAILED_S, code="failed_batches_quota")
    if count >= most:
        message = f"The project has {count} unfinished batches; its quota is {most}."
        raise QuotaReached(f"{message} Wait for one to finish.", BATCH_RETRY_S, code="batches_quota")
    if project.max_enqueued_tokens is not None:
        tokens = await enqueued_tokens(session, project.id)
        if tokens >= project.max_enqueued_tokens:
            message = f"The project has {tokens} prompt tokens enqueued; its quota is {project.max_enqueued_tokens}."
            raise QuotaReached(f"{message} Wait for batches to finish.", BATCH_RETRY_S, code="enqueued_tokens_quota")


async def room_for_bytes(session: AsyncSession, project: Project) -> int | None:
    """Return how many more bytes the project's files may take; None without a quota."""
    return None if project.max_bytes is None else max(0, project.max_bytes - await _used_bytes(session, project))


async def _used_bytes(session: AsyncSession, project: Project) -> int:
    kept = select(func.coalesce(func.sum(File.size_bytes), 0)).where(
        File.project_id == project.id, File.deleted_at.is_(None)
    )
    coming = select(func.coalesce(func.sum(Upload.size_bytes), 0)).where(
        Upload.project_id == project.id, Upload.status == UploadStatus.PENDING
    )
    made = select(func.coalesce(func.sum(Batch.index_bytes), 0)).where(_live(project.id))
    return sum([int((await session.execute(each)).scalar_one()) for each in (kept, coming, made)])


async def check_files(session: AsyncSession, project_id: str, most: int) -> None:
    """Raise QuotaReached if the project has `most` files and pending uploads."""
    kept = select(func.count()).select_from(File).where(File.project_id == project_id, File.deleted_at.is_(None))
    coming = (
        select(func.count())
        .select_from(Upload)
        .where(Upload.project_id == project_id, Upload.status == UploadStatus.PENDING)
    )
    count = sum([int((await session.execute(each)).scalar_one()) for each in (kept, coming)])
    if count >= most:
        message = f"The project has {count:,} files and pending uploads; it may have {most:,}."
        raise QuotaReached(f"{message} Delete files or wait until some expire.", BYTES_RETRY_S, code="files_quota")


async def check_bytes(session: AsyncSession, project: Project, more: int) -> None:
    """Raise QuotaReached if `more` bytes do not fit beside the other files, PayloadTooLarge if they never can.

    This is final only while the project's row is locked (`hold`).
    """
    if project.max_bytes is None:
        return
    if more > project.max_bytes:
        message = f"The file has {more} bytes, which is more than the project's quota of {project.max_bytes}."
        raise PayloadTooLarge(message, code="file_too_large", param="file")
    used = await _used_bytes(session, project)
    if used + more > project.max_bytes:
        quota = f"{more} more would exceed its quota of {project.max_bytes}. Delete files or wait until some expire."
        message = f"The project's files and batches take {used} bytes; {quota}"
        raise QuotaReached(message, BYTES_RETRY_S, code="bytes_quota")


def _live(project_id: str) -> ColumnElement[bool]:
    return (Batch.project_id == project_id) & Batch.status.in_(LIVE)
