"""/v1/files/{id}/content: serves a file's bytes or a range of them, and a batch's results even while it runs."""

import re
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from sqlalchemy import select
from starlette.types import Receive, Scope, Send

from service import ids
from service.api.batches import find_batch
from service.api.bodies import ObjectId
from service.api.caller import CalledBy
from service.api.context import Context, InContext
from service.api.files import find_file
from service.db.moves import LIVE
from service.db.tables import Batch, BatchStatus, File, OutputOrder
from service.errors import BadRequest, RangeNotSatisfiable
from service.objects.early_results import Size, run_sizes
from service.objects.storage import file_key
from service.tenants.keys import Caller

PIECE_BYTES = 64 * 1024  # of a download, which a slow client has this process hold
GROWING = "batchweave-growing"  # header: whether more bytes may follow these later

router = APIRouter(prefix="/v1/files", tags=["files"])


@router.get("/{file_id}/content", response_class=StreamingResponse)
async def get_content(file_id: ObjectId, request: Request, context: InContext, caller: CalledBy) -> Response:
    """Return the file's bytes, or the requested Range of them. Early results of a batch only grow at their end."""
    early = ids.early_file(file_id)
    if early is not None:
        return await _early_content(*early, request, context, caller)
    return _whole(await find_file(context, caller, file_id), request, context, caller)


def _whole(file: File, request: Request, context: Context, caller: Caller) -> Response:
    # A file never changes, so its id is its version.
    headers = {"Accept-Ranges": "bytes", "ETag": f'"{file.id}"', "Content-Disposition": attachment(file.filename)}
    if request.headers.get("if-none-match") in ("*", headers["ETag"]):
        return Response(status_code=304, headers=headers)
    wanted = request.headers.get("range")
    if request.headers.get("if-range", headers["ETag"]) != headers["ETag"]:
        wanted = None
    span = _Span.of(wanted, file.size_bytes, headers)
    content = context.storage.stream(file_key(file.id), span.start, span.end, PIECE_BYTES)
    return _answer(content, span, str(file.size_bytes), headers, context.body_bytes.download(caller.project.id))


async def _early_content(
    batch_id: str, is_output: bool, request: Request, context: Context, caller: Caller
) -> Response:
    """Serve the batch's results so far, or its result file once it is finished."""
    async with context.database.read() as session:
        batch = await find_batch(session, caller, batch_id)
    looks = batch.status == BatchStatus.IN_PROGRESS and batch.output_order == OutputOrder.ANY
    sizes = await _readable(context, batch_id, looks)
    async with context.database.read() as session:  # read after the sizes, which are deleted when the batch ends
        batch = await find_batch(session, caller, batch_id)
    if batch.status not in LIVE:
        file_id = batch.output_file_id if is_output else batch.error_file_id
        if file_id is not None:
            return _whole(await find_file(context, caller, file_id), request, context, caller)
    elif batch.output_order == OutputOrder.INPUT:
        message = f"The results of {batch_id} come in input order, so they are readable only once it is finished."
        raise BadRequest(message, code="batch_not_ended", param="id")
    size = sum(each.of(is_output) for each in sizes)
    headers = {
        "Accept-Ranges": "bytes",
        "Cache-Control": "no-store",
        GROWING: "yes" if batch.status in LIVE else "no",
        "Content-Disposition": attachment(f"{batch_id}_{'output' if is_output else 'error'}.jsonl"),
    }
    span = _Span.of(request.headers.get("range"), size, headers)
    content = _growing(context, batch_id, sizes, is_output, span)
    return _answer(content, span, "*", headers, context.body_bytes.download(caller.project.id))


def attachment(name: str) -> str:
    """Return the header that lets a browser or `curl -OJ` save a file under its name (RFC 6266)."""
    plain = re.sub(r"[^A-Za-z0-9._ -]", "_", name)
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(name, safe='')}"


async def answered_so_far(context: Context, batch_id: str, is_output: bool, start: int = 0) -> AsyncIterator[bytes]:
    """Stream the output or error lines of an unfinished batch whose output may come in any order, from `start` on."""
    sizes = await _readable(context, batch_id, True)
    end = sum(each.of(is_output) for each in sizes)
    span = _Span(min(start, end), end, False)
    async for part in _growing(context, batch_id, sizes, is_output, span):
        yield part


async def _readable(context: Context, batch_id: str, looks_for_more: bool) -> list[Size]:
    if looks_for_more:
        with suppress(FileNotFoundError):  # the batch has just ended, and its segments are gone
            await context.early.refresh(batch_id)
    async with context.database.read() as session:
        return await run_sizes(session, batch_id)


async def _growing(
    context: Context, batch_id: str, sizes: list[Size], is_output: bool, span: "_Span"
) -> AsyncIterator[bytes]:
    """Stream early results; if the batch ends during the read, stream the rest from its result file."""
    sent = 0
    try:
        async for part in context.early.stream(batch_id, sizes, is_output, span.start, span.end):
            yield part
            sent += len(part)
    except FileNotFoundError:
        async with context.database.read() as session:
            batch = (await session.scalars(select(Batch).where(Batch.id == batch_id))).one()
        file_id = (batch.output_file_id if is_output else batch.error_file_id) or ""
        async for part in context.storage.stream(file_key(file_id), span.start + sent, span.end):
            yield part


@dataclass(frozen=True, slots=True)
class _Span:
    """The bytes [start, end); `is_part` is true if the client requested a range."""

    start: int
    end: int
    is_part: bool

    @classmethod
    def of(cls, header: str | None, size_bytes: int, about: dict[str, str]) -> "_Span":
        """Parse a Range header; one that RFC 9110 lets us ignore selects the whole file.

        Raises RangeNotSatisfiable, with the headers `about`.
        """
        match = re.fullmatch(r"bytes=([0-9]{0,32})-([0-9]{0,32})", (header or "").strip())
        if match is None or not any(match.groups()):
            return cls(0, size_bytes, False)
        first, last = match.groups()
        start = int(first) if first else max(size_bytes - int(last), 0)
        end = min(int(last) + 1, size_bytes) if first and last else size_bytes
        if first and last and int(last) < int(first):
            return cls(0, size_bytes, False)
        if start >= end:
            raise RangeNotSatisfiable(f"The range {header!r} is outside the {size_bytes} bytes.", size_bytes, about)
        return cls(start, end, True)


class Download(StreamingResponse):
    """Streams a file, and is counted while it does."""

    counted: AbstractContextManager[None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.counted:
            await super().__call__(scope, receive, send)


def _answer(
    content: AsyncIterator[bytes],
    span: _Span,
    size: str,
    headers: dict[str, str],
    counted: AbstractContextManager[None],
) -> Response:
    headers["Content-Length"] = str(span.end - span.start)
    if span.is_part:
        headers["Content-Range"] = f"bytes {span.start}-{span.end - 1}/{size}"
    response = Download(
        content if span.start < span.end else _nothing(),
        status_code=206 if span.is_part else 200,
        media_type="application/octet-stream",
        headers=headers,
    )
    response.counted = counted
    return response


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield
