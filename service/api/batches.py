"""/v1/batches: create, look, list, cancel. The request only writes a row; the planner role does the rest."""

import hashlib
from typing import Annotated

from fastapi import APIRouter, Query
from sqlalchemy import ColumnElement, func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from service import ids
from service.api.again import Again, TriedAgain, digest
from service.api.caller import CalledBy
from service.api.context import Context, Here
from service.api.pages import page_rows
from service.api.shapes import BatchObject, CreateBatch, ObjectId, Page
from service.db.moves import TERMINAL, move_batch
from service.db.tables import Batch, BatchStatus, File
from service.endpoints import ENDPOINTS
from service.errors import BadRequest, NotFound
from service.queue.leases import Counts
from service.standing import alive_by_model, standing
from service.tenants import audit
from service.tenants.keys import Caller
from service.tenants.quotas import check_batches, hold

_UNIT_S = {"m": 60, "h": 3600, "d": 86400}
_LIVE = (BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING, BatchStatus.CANCELLING)

router = APIRouter(prefix="/v1/batches", tags=["batches"])


@router.post("")
async def create_batch(body: CreateBatch, here: Here, caller: CalledBy, again: TriedAgain) -> BatchObject:
    """Accept a batch for validation; one that an earlier try of this request created is returned as it is."""
    if body.endpoint not in ENDPOINTS:
        message = f"endpoint {body.endpoint!r} is none of {', '.join(ENDPOINTS)}."
        raise BadRequest(message, code="invalid_endpoint", param="endpoint")
    try:
        return await _shape(here, await _create(body, here, caller, again))
    except IntegrityError:  # another try with the same key was faster
        return await _shape(here, await _create(body, here, caller, again))


async def _create(body: CreateBatch, here: Context, caller: Caller, again: Again) -> Batch:
    now, asked = int(here.clock()), digest(body)
    async with here.database.write() as session:
        await hold(session, caller.project.id)  # so that of two tries at once the second sees the first
        before = await again.find(session, caller.project.id, asked, now)
        if before is not None:
            return before
        mine = (File.id == body.input_file_id) & (File.project_id == caller.project.id)
        file = (await session.scalars(select(File).where(mine, _is_kept(now)))).one_or_none()
        if file is None:
            message = f"No such File object: {body.input_file_id}. Upload it with purpose 'batch' first."
            raise BadRequest(message, code="file_not_found", param="input_file_id")
        if file.purpose != "batch":
            message = f"The file {file.id} has purpose {file.purpose!r}; a batch needs 'batch'."
            raise BadRequest(message, code="invalid_purpose", param="input_file_id")
        await check_batches(session, caller.project.id)
        batch = Batch(
            id=ids.batch_id(),
            project_id=caller.project.id,
            status=BatchStatus.VALIDATING,
            endpoint=body.endpoint,
            input_file_id=file.id,
            completion_window=body.completion_window,
            custom_metadata=body.metadata,
            output_expires_after_s=body.output_expires_after.seconds if body.output_expires_after else None,
            output_order=body.batchweave.output_order,
            idempotency_key=again.key,
            asked=asked,
            created_at=now,
            expires_at=now + _seconds(body.completion_window),
        )
        session.add(batch)
        audit.note(session, caller, "batch.create", batch.id, now)
    return batch


@router.get("")
async def list_batches(
    here: Here, caller: CalledBy, after: ObjectId | None = None, limit: Annotated[int, Query(ge=1, le=100)] = 20
) -> Page[BatchObject]:
    async with here.database.read() as session:
        rows = await page_rows(session, Batch, select(Batch), caller.project.id, after=after, limit=limit)
    workers = await alive_by_model(here.heartbeat)
    return Page[BatchObject].of([await _shape(here, row, workers) for row in rows], limit)


@router.get("/{batch_id}")
async def get_batch(batch_id: ObjectId, here: Here, caller: CalledBy) -> BatchObject:
    async with here.database.read() as session:
        batch = await _find(session, caller, batch_id)
    return await _shape(here, batch)


@router.post("/{batch_id}/retry")
async def retry_batch(batch_id: ObjectId, here: Here, caller: CalledBy, again: TriedAgain) -> BatchObject:
    """A new batch of the same input with only the requests that failed, or were not run before it ended."""
    try:
        return await _shape(here, await _retry(batch_id, here, caller, again))
    except IntegrityError:  # another try with the same key was faster
        return await _shape(here, await _retry(batch_id, here, caller, again))


async def _retry(batch_id: str, here: Context, caller: Caller, again: Again) -> Batch:
    now, asked = int(here.clock()), hashlib.sha256(f"retry {batch_id}".encode()).hexdigest()
    async with here.database.write() as session:
        await hold(session, caller.project.id)  # so that of two tries at once the second sees the first
        before = await again.find(session, caller.project.id, asked, now)
        if before is not None:
            return before
        source = await _find(session, caller, batch_id)
        if source.status not in TERMINAL:
            message = f"The batch is {source.status}: it can be retried when it has ended."
            raise BadRequest(message, code="batch_not_ended", param="id")
        if source.error_file_id is None:
            reason = "the file itself has errors; mend it" if source.errors else "no request of it failed"
            raise BadRequest(f"There is nothing to retry: {reason}.", code="nothing_to_retry", param="id")
        kept = (
            select(func.count())
            .select_from(File)
            .where(File.id.in_([source.input_file_id, source.error_file_id]), _is_kept(now))
        )
        if int((await session.execute(kept)).scalar_one()) != 2:
            message = "The batch's input or error file was deleted or has expired; send the requests in a new file."
            raise BadRequest(message, code="file_not_found", param="id")
        await check_batches(session, caller.project.id)
        batch = Batch(
            id=ids.batch_id(),
            project_id=caller.project.id,
            status=BatchStatus.VALIDATING,
            endpoint=source.endpoint,
            input_file_id=source.input_file_id,
            completion_window=source.completion_window,
            custom_metadata=source.custom_metadata,
            output_expires_after_s=source.output_expires_after_s,
            output_order=source.output_order,
            retry_of=source.id,
            idempotency_key=again.key,
            asked=asked,
            created_at=now,
            expires_at=now + _seconds(source.completion_window),
        )
        session.add(batch)
        audit.note(session, caller, "batch.retry", batch.id, now)
    return batch


@router.post("/{batch_id}/cancel")
async def cancel_batch(batch_id: ObjectId, here: Here, caller: CalledBy) -> BatchObject:
    """Stop the batch; what is answered stays. Cancelling twice is no error, cancelling an ended batch is."""
    async with here.database.write() as session:
        await _find(session, caller, batch_id)
        if await move_batch(session, batch_id, BatchStatus.CANCELLING, now=here.clock()):
            audit.note(session, caller, "batch.cancel", batch_id, here.clock())
        batch = await _find(session, caller, batch_id)
        if batch.status not in (BatchStatus.CANCELLING, BatchStatus.CANCELLED):
            ended = batch.status in TERMINAL
            message = f"The batch is {batch.status}" + (
                ": it has ended." if ended else " and ends by itself in a moment."
            )
            raise BadRequest(message, code="batch_not_cancellable", param="id")
    return await _shape(here, batch)


async def _find(session: AsyncSession, caller: Caller, batch_id: str) -> Batch:
    mine = (Batch.id == batch_id) & (Batch.project_id == caller.project.id)
    wanted = select(Batch).where(mine).execution_options(populate_existing=True)
    batch = (await session.scalars(wanted)).one_or_none()
    if batch is None:
        raise NotFound(f"No such Batch object: {batch_id}", param="id")
    return batch


def _is_kept(now: int) -> ColumnElement[bool]:
    """Whether a file is there, and not about to be deleted."""
    return File.deleted_at.is_(None) & (File.expires_at.is_(None) | (File.expires_at > now))


def _seconds(completion_window: str) -> int:
    return int(completion_window[:-1]) * _UNIT_S[completion_window[-1]]


async def _shape(here: Context, batch: Batch, workers: dict[str, int] | None = None) -> BatchObject:
    counts = Counts(batch.completed, batch.failed)
    if batch.status in _LIVE:
        counts = await here.progress.counts(here.database, batch.id)
    if batch.status not in TERMINAL and workers is None:
        workers = await alive_by_model(here.heartbeat)
    found = await standing(here.database, batch, counts, workers or {}, here.clock())
    return BatchObject.of(batch, counts, found)
