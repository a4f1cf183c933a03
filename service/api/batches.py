"""/v1/batches: create, get, list, retry, start, cancel. The API only writes a row; the planner role does the rest."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated

from fastapi import APIRouter, Query
from sqlalchemy import ColumnElement, case, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from service import ids
from service.api.bodies import CreateBatch, ObjectId, RetryBatch
from service.api.caller import CalledBy
from service.api.context import Context, InContext
from service.api.files import check_no_retry, check_room
from service.api.idempotency import Again, TriedAgain, digest
from service.api.pages import page_rows
from service.api.shapes import BatchDeleted, BatchObject, Page
from service.db.deletions import forget_batch
from service.db.models import timed_models
from service.db.moves import LIVE, STARTABLE, TERMINAL, move_batch, rows_changed
from service.db.tables import FILE_KEEP_S, Batch, BatchStatus, File, OnLongLine
from service.endpoints import BY_PATH, ENDPOINTS
from service.errors import BadRequest, NotFound
from service.estimates.standing import Surroundings, running, standing
from service.objects.request_index import RequestIndex
from service.objects.shards import RetryOutcome
from service.objects.storage import file_key
from service.queue.bell import Job
from service.queue.counts import Counts
from service.tenants import audit
from service.tenants.keys import Caller
from service.tenants.quotas import check_batches, hold

MOST_WINDOW_S = FILE_KEEP_S
LISTED_ERRORS = 10  # shown for each batch in a list
_UNIT_S = {"m": 60, "h": 3600, "d": 86400}

router = APIRouter(prefix="/v1/batches", tags=["batches"])


@router.post("")
async def create_batch(body: CreateBatch, context: InContext, caller: CalledBy, again: TriedAgain) -> BatchObject:
    """Create a batch and queue it for validation. A retry of the request returns the batch already created."""
    if body.endpoint not in ENDPOINTS:
        message = f"endpoint must be one of {', '.join(ENDPOINTS)}, not {body.endpoint!r}."
        raise BadRequest(message, code="invalid_endpoint", param="endpoint")
    if _window_s(body.completion_window) > MOST_WINDOW_S:
        message = f"completion_window {body.completion_window!r} is longer than 30d, the time that files are kept."
        raise BadRequest(message, code="invalid_completion_window", param="completion_window")

    accept = body.batchweave.accept
    if accept is not None and not BY_PATH[body.endpoint].generates:
        message = f"batchweave.accept: answers of {body.endpoint} are no texts."
        raise BadRequest(message, code="invalid_request", param="batchweave.accept")

    async def make(session: AsyncSession, now: int) -> Batch:
        file = await _input_file(session, caller, body.input_file_id, now)
        return Batch(
            endpoint=body.endpoint,
            input_file_id=file.id,
            completion_window=body.completion_window,
            custom_metadata=body.metadata,
            output_expires_after_s=body.output_expires_after.seconds if body.output_expires_after else None,
            output_order=body.batchweave.output_order,
            on_long_line=body.batchweave.on_long_line,
            held=body.batchweave.hold,
            accept=accept.chosen if accept else None,
            unknown_fields=body.unknown_fields or None,
        )

    asked = body.model_dump(include=set(CreateBatch.model_fields))
    asked["batchweave"]["accept"] = accept.chosen if accept else None
    # Left out at their defaults, as before these options existed, so that a retry across an upgrade is recognized.
    for name, default in (("hold", False), ("on_long_line", OnLongLine.FAIL_LINE), ("accept", None)):
        if asked["batchweave"][name] == default:
            del asked["batchweave"][name]
    return await shape(context, await _add_once(context, caller, again, "batch.create", digest(asked), make))


async def _input_file(session: AsyncSession, caller: Caller, file_id: str, now: int) -> File:
    """Return the file with this id. Raises BadRequest if it does not exist or is not for batches."""
    mine = (File.id == file_id) & (File.project_id == caller.project.id)
    file = (await session.scalars(select(File).where(mine, _is_kept(now)))).one_or_none()
    if file is None:
        message = f"No such File object: {file_id}. Upload it with purpose 'batch' first."
        raise BadRequest(message, code="file_not_found", param="input_file_id")
    if file.purpose != "batch":
        message = f"The file {file.id} has the purpose {file.purpose!r}; a batch needs a file with the purpose 'batch'."
        raise BadRequest(message, code="invalid_purpose", param="input_file_id")
    return file


async def _add_once(
    context: InContext,
    caller: Caller,
    again: Again,
    action: str,
    asked: str,
    make: Callable[[AsyncSession, int], Awaitable[Batch]],
) -> Batch:
    """Store the batch that `make` returns, with what all batches have: an owner, a key, and a window that begins now.

    If an earlier attempt of the same request, recognized by its digest `asked`, created a batch, return that batch.
    """
    now = int(context.clock())
    async with context.database.write(caller.project.id) as session:
        project = await hold(session, caller.project.id)  # so that the second of two concurrent attempts sees the first
        found = await again.find(session, project.id, asked, now)
        if found is not None:
            return found
        check_room(context, 0)
        batch = await make(session, now)
        await check_batches(session, project, context.settings.max_batches, now)
        batch.id, batch.status, batch.asked = ids.batch_id(), BatchStatus.VALIDATING, asked
        batch.project_id, batch.idempotency_key = project.id, again.key
        batch.created_at, batch.expires_at = now, now + _window_s(batch.completion_window)
        session.add(batch)
        about = f"{batch.endpoint}, {batch.completion_window}"
        audit.note(session, caller, action, batch.id, now, about)
    await context.bell.ring(Job.VALIDATOR)
    return batch


@router.get("")
async def list_batches(
    context: InContext, caller: CalledBy, after: ObjectId | None = None, limit: Annotated[int, Query(ge=1, le=100)] = 20
) -> Page[BatchObject]:
    async with context.database.read() as session:
        kept = select(Batch).where(Batch.deleted_at.is_(None))
        rows = await page_rows(session, Batch, kept, caller.project.id, after=after, limit=limit)
    return Page[BatchObject].of(await shapes(context, rows, LISTED_ERRORS), limit)


@router.get("/{batch_id}")
async def get_batch(batch_id: ObjectId, context: InContext, caller: CalledBy) -> BatchObject:
    async with context.database.read() as session:
        batch = await find_batch(session, caller, batch_id)
    return await shape(context, batch)


@router.post("/{batch_id}/retry")
async def retry_batch(
    batch_id: ObjectId, context: InContext, caller: CalledBy, again: TriedAgain, body: RetryBatch | None = None
) -> BatchObject:
    """Create a batch from the same input, with only some of the requests of one that has ended.

    Without a body these are the requests that failed or did not run.
    """
    wanted = body or RetryBatch()

    async def make(session: AsyncSession, now: int) -> Batch:
        source = await find_batch(session, caller, batch_id)
        if wanted.max_tokens is not None and BY_PATH[source.endpoint].limit is None:
            message = f"max_tokens: answers of {source.endpoint} have no tokens to limit."
            raise BadRequest(message, code="invalid_request", param="max_tokens")
        outcomes = await _retriable(session, source, set(wanted.outcomes), now)
        given = wanted.model_fields_set
        return Batch(
            endpoint=source.endpoint,
            input_file_id=source.input_file_id,
            completion_window=source.completion_window,
            custom_metadata=source.custom_metadata,
            output_expires_after_s=source.output_expires_after_s,
            output_order=source.output_order,
            on_long_line=source.on_long_line,
            retry_of=source.id,
            retry_outcomes=sorted(outcomes),
            accept=(wanted.accept and wanted.accept.chosen) if "accept" in given else source.accept,
            max_tokens=wanted.max_tokens if "max_tokens" in given else source.max_tokens,
        )

    asked = {"retry": batch_id} | wanted.model_dump(exclude_unset=True)
    return await shape(context, await _add_once(context, caller, again, "batch.retry", digest(asked), make))


async def _retriable(session: AsyncSession, source: Batch, wanted: set[RetryOutcome], now: int) -> set[RetryOutcome]:
    """Return which of these outcomes the batch has. Raises BadRequest if it has none, or no files any more."""
    if source.status not in TERMINAL:
        message = f"The batch is {source.status}: it can be retried once it is finished."
        raise BadRequest(message, code="batch_not_ended", param="id")
    found = {each for each in RetryOutcome if each != RetryOutcome.FAILED and getattr(source, each)}
    found |= {RetryOutcome.FAILED} if source.error_file_id else set()
    if not wanted & found:
        reason = f"none of its requests is {' or '.join(sorted(wanted))}"
        if source.errors:
            reason = "the input file itself has errors; fix it and create a new batch"
        elif not source.total:
            reason = "the batch ended before its file was read; create it again"
        elif found:
            reason += f", but some are {', '.join(sorted(found))}: name them in `outcomes`"
        raise BadRequest(f"There is nothing to retry: {reason}.", code="nothing_to_retry", param="id")
    files = {source.input_file_id}
    files |= {source.error_file_id} if RetryOutcome.FAILED in wanted & found else set()
    files |= {source.output_file_id} if wanted & found - {RetryOutcome.FAILED} else set()
    kept = await session.execute(select(func.count()).select_from(File).where(File.id.in_(files), _is_kept(now)))
    if int(kept.scalar_one()) != len(files):
        message = "A file of the batch was deleted or has expired; upload the requests in a new file."
        raise BadRequest(message, code="file_not_found", param="id")
    return wanted & found


@router.post("/{batch_id}/start")
async def start_batch(batch_id: ObjectId, context: InContext, caller: CalledBy) -> BatchObject:
    """Start a held batch; its window begins now. Starting it again is harmless, but a finished batch cannot start."""
    now = int(context.clock())
    async with context.database.write() as session:
        batch = await find_batch(session, caller, batch_id)
        waits = (Batch.id == batch_id) & Batch.held & Batch.status.in_(STARTABLE)
        began = case((Batch.in_progress_at.is_not(None), now))  # null until its file is validated
        expires_at = now + _window_s(batch.completion_window)
        start = update(Batch).where(waits).values(held=False, expires_at=expires_at, in_progress_at=began)
        if rows_changed(await session.execute(start)) == 1:
            audit.note(session, caller, "batch.start", batch_id, now)
        batch = await find_batch(session, caller, batch_id)
        if batch.status not in STARTABLE:
            message = f"The batch is {batch.status} and cannot be started."
            raise BadRequest(message, code="batch_not_startable", param="id")
    await context.bell.ring(Job.PLANNER)
    return await shape(context, batch)


@router.post("/{batch_id}/cancel")
async def cancel_batch(batch_id: ObjectId, context: InContext, caller: CalledBy) -> BatchObject:
    """Cancel a batch; its answers are kept. Repeating this is harmless, but a finished batch cannot be cancelled."""
    async with context.database.write() as session:
        await find_batch(session, caller, batch_id)
        if await move_batch(session, batch_id, BatchStatus.CANCELLING, now=context.clock()):
            audit.note(session, caller, "batch.cancel", batch_id, context.clock())
        batch = await find_batch(session, caller, batch_id)
        if batch.status not in (BatchStatus.CANCELLING, BatchStatus.CANCELLED):
            ended = batch.status in TERMINAL
            message = f"The batch is {batch.status}" + (
                " and cannot be cancelled." if ended else " and will finish by itself in a moment."
            )
            raise BadRequest(message, code="batch_not_cancellable", param="id")
    await context.bell.ring(Job.FINALIZER)
    return await shape(context, batch)


@router.delete("/{batch_id}")
async def delete_batch(batch_id: ObjectId, context: InContext, caller: CalledBy) -> BatchDeleted:
    """Delete a batch that has ended, with its result files. Its input file stays."""
    async with context.database.write(caller.project.id) as session:
        await hold(session, caller.project.id)
        batch = await find_batch(session, caller, batch_id)
        if batch.status not in TERMINAL:
            message = f"The batch is {batch.status}: it can be deleted once it has ended. Cancel it first."
            raise BadRequest(message, code="batch_not_ended", param="id")
        await check_no_retry(session, (Batch.input_file_id == batch.input_file_id) & (Batch.retry_of == batch.id))
        files = await forget_batch(session, batch, context.clock())
        audit.note(session, caller, "batch.delete", batch_id, context.clock())
    for file_id in files:
        await context.storage.delete(file_key(file_id))
    if batch.index_id is not None:
        await context.storage.delete_all(RequestIndex(context.storage, batch.index_id).folder)
    return BatchDeleted(id=batch_id)


async def find_batch(session: AsyncSession, caller: Caller, batch_id: str) -> Batch:
    """Return the caller's batch with this id, read afresh. Raises NotFound."""
    mine = (Batch.id == batch_id) & (Batch.project_id == caller.project.id) & Batch.deleted_at.is_(None)
    wanted = select(Batch).where(mine).execution_options(populate_existing=True)
    batch = (await session.scalars(wanted)).one_or_none()
    if batch is None:
        raise NotFound(f"No such Batch object: {batch_id}", param="id")
    return batch


def _window_s(window: str) -> int:
    return int(window[:-1]) * _UNIT_S[window[-1]]


def _is_kept(now: int) -> ColumnElement[bool]:
    """Return the SQL condition that a file exists and is not about to be deleted."""
    return File.deleted_at.is_(None) & (File.expires_at.is_(None) | (File.expires_at > now))


async def shape(context: Context, batch: Batch) -> BatchObject:
    """Return the batch as clients see it, with the counts of its answers so far."""
    return (await shapes(context, [batch]))[0]


async def shapes(context: Context, batches: Sequence[Batch], most_errors: int | None = None) -> list[BatchObject]:
    """Return the batches as clients see them, each with its first `most_errors` errors."""
    live = [batch.id for batch in batches if batch.status in LIVE]
    counts = await context.progress.counts_of(context.database, live) if live else {}
    serving = await context.serving_cache.serving() if live else {}
    async with context.database.read() as session:
        runs = await running(session, live)
        timed = await timed_models(session, {batch.model for batch in batches if batch.model}, context.settings)
    around = Surroundings(serving, runs, timed, context.storage.room, context.clock())
    found: list[BatchObject] = []
    for batch in batches:
        answered = counts.get(batch.id) or Counts.of_row(batch)
        about = standing(batch, answered, around)
        found.append(BatchObject.of(batch, answered, about, context.settings.worker_hour_price, most_errors))
    return found
