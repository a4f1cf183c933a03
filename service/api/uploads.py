"""/v1/uploads: upload a file in parts, which may come in parallel or repeatedly; complete joins the parts it lists."""

import asyncio
import hashlib
from collections.abc import Sequence
from weakref import WeakValueDictionary

from fastapi import APIRouter, Request
from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.requests import ClientDisconnect

from service import ids
from service.api.bodies import CompleteUpload, CreateUpload, ObjectId
from service.api.caller import CalledBy
from service.api.context import Context, InContext
from service.api.files import check_room, watched
from service.api.multipart import FormReader, form_body
from service.api.plain_text import MOST_UNPACKED, PlainText
from service.api.shapes import UploadObject, UploadPartObject
from service.db.moves import rows_changed
from service.db.tables import FILE_KEEP_S, File, Upload, UploadPart, UploadStatus
from service.errors import ApiError, BadRequest, NotFound, PayloadTooLarge
from service.objects.storage import file_key, part_key, upload_folder
from service.tenants import audit
from service.tenants.keys import Caller
from service.tenants.quotas import check_bytes, check_files, hold, room_for_bytes

PART_BYTES = 64 * 1024 * 1024
UPLOAD_S = 3600
MAX_PARTS = 10_000
MAX_PARTS_RATIO = 2  # of all parts' bytes to the upload's; a part that is sent again counts again

router = APIRouter(prefix="/v1/uploads", tags=["uploads"])
_joined = WeakValueDictionary[str, asyncio.Lock]()  # by upload, while somebody completes it here


@router.post("")
async def create_upload(body: CreateUpload, context: InContext, caller: CalledBy) -> UploadObject:
    """Start an upload. All its parts and its completion must arrive within one hour."""
    most = min(context.settings.max_file_bytes, MAX_PARTS * PART_BYTES)
    if body.bytes > most:
        message = f"A file can have at most {most} bytes."
        raise PayloadTooLarge(message, code="file_too_large", param="bytes")
    check_room(context, body.bytes)
    now = int(context.clock())
    upload = Upload(
        id=ids.upload_id(),
        project_id=caller.project.id,
        purpose=body.purpose,
        filename=body.filename.replace("\x00", ""),
        size_bytes=body.bytes,
        keep_s=body.expires_after.seconds if body.expires_after else FILE_KEEP_S,
        status=UploadStatus.PENDING,
        created_at=now,
        expires_at=now + UPLOAD_S,
    )
    async with context.database.write(caller.project.id) as session:
        project = await hold(session, caller.project.id)
        await check_files(session, project.id, context.settings.max_files)
        await check_bytes(session, project, body.bytes)
        session.add(upload)
        audit.note(session, caller, "upload.create", upload.id, now)
    return UploadObject.of(upload, None)


@router.post("/{upload_id}/parts", openapi_extra=form_body(["data"], {"data": {"type": "string", "format": "binary"}}))
async def create_part(upload_id: ObjectId, request: Request, context: InContext, caller: CalledBy) -> UploadPartObject:
    """Add a part of at most 64 MiB. The order of the parts is the order in which the complete call lists them."""
    upload, _ = await _find(context, caller, upload_id)
    _check_pending(upload, context.clock())
    check_room(context, 0)
    async with context.database.read() as session:
        sent = select(func.coalesce(func.sum(UploadPart.size_bytes), 0)).where(UploadPart.upload_id == upload_id)
        before = int((await session.execute(sent)).scalar_one())
    left = max(0, MAX_PARTS_RATIO * upload.size_bytes - before)
    reader = FormReader(request.headers.get("content-type", ""), min(PART_BYTES, left), field="data")
    part_id = ids.part_id()
    key = part_key(upload_id, part_id)
    try:
        async with context.storage.writer(key) as writer:
            with context.body_bytes.upload(caller.project.id) as counted:
                form = await reader.read(counted.stream(request.stream()), watched(context, writer.write, counted))
            if form.filename is None:
                raise BadRequest("The form has no part named 'data'.", code="missing_required_parameter", param="data")
            if not form.size_bytes:
                raise BadRequest("The part is empty.", code="empty_part", param="data")
    except ClientDisconnect as error:
        raise BadRequest("The upload was cut off.") from error
    except PayloadTooLarge:
        if reader.form.size_bytes <= PART_BYTES:
            raise _too_many(before + reader.form.size_bytes, MAX_PARTS_RATIO * upload.size_bytes) from None
        raise
    now = int(context.clock())
    part = UploadPart(id=part_id, upload_id=upload_id, size_bytes=form.size_bytes, created_at=now)
    try:
        async with context.database.write() as session:
            # Locked, so that parts that arrive at the same time are all counted.
            locked = select(Upload).where(Upload.id == upload_id).with_for_update()
            _check_pending((await session.scalars(locked)).one(), now)
            sizes = select(func.count(), func.coalesce(func.sum(UploadPart.size_bytes), 0))
            count, before = (await session.execute(sizes.where(UploadPart.upload_id == upload_id))).one()
            if count >= MAX_PARTS:
                raise BadRequest(f"An upload can have at most {MAX_PARTS} parts.", code="too_many_parts", param="data")
            if before + form.size_bytes > MAX_PARTS_RATIO * upload.size_bytes:
                raise _too_many(before + form.size_bytes, MAX_PARTS_RATIO * upload.size_bytes)
            session.add(part)
    except ApiError:
        await context.storage.delete(key)
        raise
    return UploadPartObject(id=part.id, created_at=now, upload_id=upload_id)


@router.post("/{upload_id}/complete")
async def complete_upload(
    upload_id: ObjectId, body: CompleteUpload, context: InContext, caller: CalledBy
) -> UploadObject:
    """Join the listed parts into a file. Completing again, for example after a lost response, returns the same file."""
    # Two calls would join its parts twice, on the disk at once.
    lock = _joined.setdefault(upload_id, asyncio.Lock())
    async with lock:
        return await _complete(upload_id, body, context, caller)


async def _complete(upload_id: str, body: CompleteUpload, context: Context, caller: Caller) -> UploadObject:
    upload, file = await _find(context, caller, upload_id)
    if upload.status == UploadStatus.COMPLETED:
        return UploadObject.of(upload, file)
    _check_pending(upload, context.clock())
    await _check_parts(context, upload, body.part_ids)
    now = int(context.clock())
    file = File(
        id=ids.file_id(),
        project_id=upload.project_id,
        purpose=upload.purpose,
        filename=upload.filename,
        size_bytes=upload.size_bytes,
        created_at=now,
        expires_at=now + upload.keep_s,
    )
    check_room(context, upload.size_bytes)
    async with context.database.read() as session:
        room = await room_for_bytes(session, caller.project)
    limit = context.settings.max_file_bytes
    most = limit if room is None else min(limit, room + upload.size_bytes)
    try:
        text = await _join(context, upload, body, file_key(file.id), most)
        file.size_bytes, file.filename = text.size_bytes, text.named(file.filename)
    except FileNotFoundError as error:  # another call has just completed or cancelled it
        upload, stored = await _find(context, caller, upload_id)
        if upload.status == UploadStatus.COMPLETED:
            return UploadObject.of(upload, stored)
        raise BadRequest("The upload is no longer pending.", code="upload_not_pending") from error
    try:
        async with context.database.write(upload.project_id) as session:
            project = await hold(session, upload.project_id)
            won = await _move(session, caller, upload_id, UploadStatus.COMPLETED, file_id=file.id)
            if won:
                await check_bytes(session, project, file.size_bytes)  # an unpacked gzip file is larger than announced
                session.add(file)
                audit.note(session, caller, "upload.complete", upload_id, now)
    except ApiError:
        await context.storage.delete(file_key(file.id))
        raise
    if not won:  # another call was faster, or the upload has just ended
        await context.storage.delete(file_key(file.id))
    upload, stored = await _find(context, caller, upload_id)
    if upload.status != UploadStatus.COMPLETED:
        _check_pending(upload, context.clock())
    await context.storage.delete_all(upload_folder(upload_id))
    return UploadObject.of(upload, stored)


@router.post("/{upload_id}/cancel")
async def cancel_upload(upload_id: ObjectId, context: InContext, caller: CalledBy) -> UploadObject:
    """Cancel the upload. Repeating the call is harmless."""
    async with context.database.write() as session:
        if await _move(session, caller, upload_id, UploadStatus.CANCELLED):
            audit.note(session, caller, "upload.cancel", upload_id, context.clock())
    upload, file = await _find(context, caller, upload_id)
    if upload.status != UploadStatus.CANCELLED:
        _check_pending(upload, context.clock())
    await context.storage.delete_all(upload_folder(upload_id))
    return UploadObject.of(upload, file)


async def _find(context: Context, caller: Caller, upload_id: str) -> tuple[Upload, File | None]:
    """Return the caller's upload, and its file once it is complete. Raises NotFound."""
    mine = (Upload.id == upload_id) & (Upload.project_id == caller.project.id)
    async with context.database.read() as session:
        found = (
            await session.execute(select(Upload, File).outerjoin(File, File.id == Upload.file_id).where(mine))
        ).one_or_none()
    if found is None:
        raise NotFound(f"No such Upload object: {upload_id}", param="upload_id")
    return found[0], found[1]


def _check_pending(upload: Upload, now: float) -> None:
    """Raise BadRequest if the upload is no longer pending."""
    if upload.status != UploadStatus.PENDING:
        raise BadRequest(f"The upload is already {upload.status}.", code="upload_not_pending", param="upload_id")
    if upload.expires_at <= now:
        raise BadRequest("The upload has expired; create a new one.", code="upload_expired", param="upload_id")


async def _check_parts(context: Context, upload: Upload, part_ids: Sequence[str]) -> None:
    """Raise BadRequest unless these are parts of the upload, each listed once, and their sizes add up to its size."""
    async with context.database.read() as session:
        rows = await session.execute(
            select(UploadPart.id, UploadPart.size_bytes).where(UploadPart.upload_id == upload.id)
        )
        sizes = {str(part_id): int(size) for part_id, size in rows}
    unknown = next((part_id for part_id in part_ids if part_id not in sizes), None)
    if unknown is not None:
        raise BadRequest(f"The upload has no part {unknown[:100]!r}.", code="part_not_found", param="part_ids")
    if len(set(part_ids)) < len(part_ids):
        raise BadRequest("A part is listed twice.", code="duplicate_part", param="part_ids")
    total = sum(sizes[part_id] for part_id in part_ids)
    if total != upload.size_bytes:
        message = f"The parts have {total} bytes in total; the upload was created with {upload.size_bytes}."
        raise BadRequest(message, code="bytes_mismatch", param="part_ids")


def _too_many(found: int, most: int) -> BadRequest:
    message = f"The parts, including repeated ones, have {found} bytes; at most {most} are allowed."
    return BadRequest(message, code="too_many_bytes", param="data")


async def _join(context: Context, upload: Upload, body: CompleteUpload, key: str, most: int) -> PlainText:
    """Join the parts into the file's object, of at most `most` bytes, and return its text.

    Raises BadRequest if the MD5 differs, FileNotFoundError if a part is gone.
    """
    digest = hashlib.md5(usedforsecurity=False)
    async with context.storage.writer(key, min(most, MOST_UNPACKED * upload.size_bytes)) as writer:
        with context.body_bytes.upload(upload.project_id) as counted:
            text = PlainText(watched(context, writer.write, counted), most)
            for part_id in body.part_ids:
                async for chunk in context.storage.stream(part_key(upload.id, part_id)):
                    digest.update(chunk)
                    await text.write(chunk)
            await text.end()
        if body.md5 is not None and body.md5.lower() != digest.hexdigest():
            message = f"The file's MD5 is {digest.hexdigest()}, not {body.md5}. Send the parts again."
            raise BadRequest(message, code="md5_mismatch", param="md5")
    return text


async def _move(session: AsyncSession, caller: Caller, upload_id: str, to: UploadStatus, **values: str) -> bool:
    """End the caller's upload in one statement if it is pending; return whether it was."""
    mine = (Upload.id == upload_id) & (Upload.project_id == caller.project.id)
    pending = mine & (Upload.status == UploadStatus.PENDING)
    return rows_changed(await session.execute(update(Upload).where(pending).values(status=to, **values))) == 1
