"""/v1/files: upload a file as a stream, and list, get and delete files."""

import re
from typing import Annotated

from fastapi import APIRouter, Query, Request
from sqlalchemy import ColumnElement, exists, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased
from starlette.requests import ClientDisconnect

from service import ids
from service.api.bodies import ObjectId
from service.api.body_bytes import CountedBody
from service.api.caller import CalledBy
from service.api.context import Context, InContext
from service.api.multipart import Form, FormReader, form_body
from service.api.pages import Order, page_rows
from service.api.plain_text import MOST_UNPACKED, PlainText, Sink
from service.api.shapes import FileDeleted, FileObject, Page
from service.db.deletions import forget_file
from service.db.moves import LIVE
from service.db.tables import FILE_KEEP_S, Batch, File
from service.errors import ApiError, BadRequest, NotFound, PayloadTooLarge, StorageFull
from service.objects.storage import NoRoom, file_key
from service.tenants import audit
from service.tenants.keys import Caller
from service.tenants.quotas import check_bytes, check_files, hold, room_for_bytes

FORM_OVERHEAD_BYTES = 1024 * 1024
MOST_LISTED = 1000  # files of a page, which is written in the loop; OpenAI's has up to 10,000

router = APIRouter(prefix="/v1/files", tags=["files"])

_FIELDS = {
    "purpose": {"type": "string", "enum": ["batch"]},
    "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
    "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2592000},
}
_FORM = form_body(["purpose", "file"], {**_FIELDS, "file": {"type": "string", "format": "binary"}})


@router.post("", openapi_extra=_FORM)
async def create_file(request: Request, context: InContext, caller: CalledBy) -> FileObject:
    """Upload a JSONL file of requests."""
    limit = context.settings.max_file_bytes
    length = request.headers.get("content-length", "")
    announced = max(int(length) - FORM_OVERHEAD_BYTES, 0) if re.fullmatch(r"[0-9]{1,18}", length) else 0
    if announced > limit:
        raise PayloadTooLarge(f"The file is larger than {limit} bytes.", code="file_too_large", param="file")
    check_room(context, announced)
    async with context.database.read() as session:  # so that it is not refused only after all of it has arrived
        await check_files(session, caller.project.id, context.settings.max_files)
        await check_bytes(session, caller.project, announced)
        left = await room_for_bytes(session, caller.project)
    most = limit if left is None else min(limit, left)
    reader = FormReader(request.headers.get("content-type", ""), most, fields=_FIELDS)
    file_id = ids.file_id()
    try:
        expected = min(limit, MOST_UNPACKED * announced) if announced else limit
        async with context.storage.writer(file_key(file_id), expected) as writer:
            with context.body_bytes.upload(caller.project.id, left) as counted:
                text = PlainText(watched(context, writer.write, counted), limit)
                form = await reader.read(counted.stream(request.stream()), text.write)
                if form.filename is None:
                    message = "The form has no part named 'file'."
                    raise BadRequest(message, code="missing_required_parameter", param="file")
                await text.end()
            form.size_bytes = text.size_bytes
            form.filename = text.named(form.filename)
            file = _file_row(file_id, caller, form, int(context.clock()))
    except ClientDisconnect as error:
        raise BadRequest("The upload was cut off.") from error
    except PayloadTooLarge:
        async with context.database.read() as session:
            await check_bytes(session, caller.project, reader.form.size_bytes)  # the quota may be the reason
        raise
    try:
        async with context.database.write(caller.project.id) as session:
            project = await hold(session, caller.project.id)
            await check_files(session, project.id, context.settings.max_files)
            await check_bytes(session, project, file.size_bytes)
            session.add(file)
            audit.note(session, caller, "file.create", file.id, context.clock(), f"{file.size_bytes:,} bytes")
    except ApiError:
        await context.storage.delete(file_key(file_id))
        raise
    return FileObject.of(file)


def check_room(context: Context, more: int) -> None:
    """Raise StorageFull if the disk has no room for `more` bytes on top of its reserve."""
    try:
        context.storage.check_room(more)
    except NoRoom as error:
        room = context.storage.room
        raise StorageFull(*(room or (0, 0))) from error


def watched(context: Context, write: Sink, counted: CountedBody) -> Sink:
    """Wrap `write` for an upload, so that it raises StorageFull or QuotaReached when there is no more room."""

    async def write_on(data: bytes) -> object:
        check_room(context, len(data))
        counted.wrote(len(data))
        return await write(data)

    return write_on


def _file_row(file_id: str, caller: Caller, form: Form, now: int) -> File:
    """Return the row of an uploaded file. Raises BadRequest if a field is missing or wrong."""
    if "purpose" not in form.fields:
        raise BadRequest("The form has no field 'purpose'.", code="missing_required_parameter", param="purpose")
    if form.fields["purpose"] != "batch":
        raise BadRequest("'purpose' must be 'batch'.", code="invalid_purpose", param="purpose")
    keep_s = FILE_KEEP_S
    if "expires_after[seconds]" in form.fields or "expires_after[anchor]" in form.fields:
        text = form.fields.get("expires_after[seconds]", "")
        if form.fields.get("expires_after[anchor]") != "created_at":
            raise BadRequest("'expires_after[anchor]' must be 'created_at'.", param="expires_after[anchor]")
        if not re.fullmatch(r"[0-9]{1,9}", text) or not 3600 <= int(text) <= 2592000:
            message = "'expires_after[seconds]' must be a whole number from 3600 to 2592000."
            raise BadRequest(message, param="expires_after[seconds]")
        keep_s = int(text)
    return File(
        id=file_id,
        project_id=caller.project.id,
        purpose="batch",
        filename=(form.filename or "").replace("\x00", "")[:1024],
        size_bytes=form.size_bytes,
        created_at=now,
        expires_at=now + keep_s,
    )


@router.get("")
async def list_files(
    context: InContext,
    caller: CalledBy,
    after: ObjectId | None = None,
    limit: Annotated[int, Query(ge=1, le=10000)] = MOST_LISTED,
    order: Order = "desc",
    purpose: str | None = None,
) -> Page[FileObject]:
    """List files. A page has at most 1,000; `has_more` says whether others follow `last_id`."""
    limit = min(limit, MOST_LISTED)
    query = select(File).where(File.deleted_at.is_(None))
    if purpose is not None:
        query = query.where(File.purpose == purpose)
    async with context.database.read() as session:
        rows = await page_rows(session, File, query, caller.project.id, after=after, limit=limit, order=order)
    return Page[FileObject].of([FileObject.of(row) for row in rows], limit)


@router.get("/{file_id}")
async def get_file(file_id: ObjectId, context: InContext, caller: CalledBy) -> FileObject:
    return FileObject.of(await find_file(context, caller, file_id))


@router.delete("/{file_id}")
async def delete_file(file_id: ObjectId, context: InContext, caller: CalledBy) -> FileDeleted:
    file = await find_file(context, caller, file_id)
    async with context.database.write(caller.project.id) as session:
        await hold(session, caller.project.id)  # so that no new batch starts to use the file
        using = (
            await session.scalars(
                select(Batch.id).where(Batch.input_file_id == file.id, Batch.status.in_(LIVE)).limit(1)
            )
        ).one_or_none()
        if using is not None:
            message = f"The file is the input of {using}, which is not finished. Cancel that batch first."
            raise BadRequest(message, code="file_in_use", param="file_id")
        source = aliased(Batch)  # of which it is a result file; a retry has the same input
        is_retry = (Batch.retry_of == source.id) & (Batch.input_file_id == source.input_file_id)
        await check_no_retry(session, exists().where(_made(source, file.id), is_retry).correlate(Batch))
        await forget_file(session, File.project_id == file.project_id, file.id, context.clock())
        audit.note(session, caller, "file.delete", file.id, context.clock())
    await context.storage.delete(file_key(file.id))
    return FileDeleted(id=file.id)


def _made(batch: type[Batch], file_id: str) -> ColumnElement[bool]:
    return (batch.error_file_id == file_id) | (batch.output_file_id == file_id)


async def check_no_retry(session: AsyncSession, which: ColumnElement[bool]) -> None:
    """Raise BadRequest if one of these batches is a retry that runs: it takes names from what its source made."""
    runs = select(Batch.id).where(which, Batch.status.in_(LIVE)).limit(1)
    if (using := (await session.scalars(runs)).one_or_none()) is not None:
        message = f"{using} retries requests of it, and is not finished. Cancel that batch first."
        raise BadRequest(message, code="file_in_use", param="id")


async def find_file(context: Context, caller: Caller, file_id: str) -> File:
    """Return the caller's file with this id. Raises NotFound."""
    mine = (File.id == file_id) & (File.project_id == caller.project.id) & File.deleted_at.is_(None)
    async with context.database.read() as session:
        file = (await session.scalars(select(File).where(mine))).one_or_none()
    if file is None:
        raise NotFound(f"No such File object: {file_id}", param="id")
    return file
