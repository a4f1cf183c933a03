"""The requests of a batch with what came of them, searched in its files: bounded, since a file may have millions."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from service.api.context import Context
from service.db.tables import Batch
from service.early_results import run_sizes
from service.storage import file_key

SHOWN = 50
MOST_BYTES = 64 * 1024 * 1024
MOST_CHARACTERS = 20_000  # of one text


@dataclass(frozen=True, slots=True)
class Line:
    custom_id: str
    ok: bool
    status: str
    text: str


@dataclass(frozen=True, slots=True)
class Found:
    """`all_searched`: whether it was the whole of what is there."""

    lines: list[Line]
    all_searched: bool


async def search(here: Context, batch: Batch, kind: str, text: str) -> Found:
    """The first lines of `kind` (output or errors) whose custom_id has `text` in it."""
    lines: list[Line] = []
    read = 0
    async for raw in _lines(here, batch, kind == "output"):
        read += len(raw)
        if read > MOST_BYTES:
            return Found(lines, False)
        line = json.loads(raw)
        if text in line["custom_id"]:
            if len(lines) == SHOWN:
                return Found(lines, False)
            lines.append(_line(line, kind == "output"))
    return Found(lines, True)


async def request_of(here: Context, batch: Batch, custom_id: str) -> tuple[str | None, str | None]:
    """A request as it was sent, and its answer, as JSON for people; None for what is not found within bounds."""
    asked = await _one(_stored(here, batch.input_file_id), custom_id)
    answer = await _one(_lines(here, batch, True), custom_id) or await _one(_lines(here, batch, False), custom_id)
    return asked, answer


async def first_lines(here: Context, file_id: str) -> AsyncIterator[bytes]:
    """Of a file as it is stored, blank ones left out; the reader stops when it has enough."""
    async for line in _stored(here, file_id):
        yield line


async def _one(lines: AsyncIterator[bytes], custom_id: str) -> str | None:
    read = 0
    wanted = json.dumps(custom_id).encode()
    async for raw in lines:
        read += len(raw)
        if read > MOST_BYTES:
            return None
        if wanted in raw or custom_id.encode() in raw:
            line = json.loads(raw)
            if line.get("custom_id") == custom_id:
                return json.dumps(line, indent=2, ensure_ascii=False)[:MOST_CHARACTERS]
    return None


async def _lines(here: Context, batch: Batch, is_output: bool) -> AsyncIterator[bytes]:
    """Of the finished file, or of what is readable early."""
    file_id = batch.output_file_id if is_output else batch.error_file_id
    if file_id is not None:
        async for line in _stored(here, file_id):
            yield line
        return
    async with here.database.read() as session:
        sizes = await run_sizes(session, batch.id)
    end = sum(size.of(is_output) for size in sizes)
    async for line in _split(here.early.stream(batch.id, sizes, is_output, 0, end)):
        yield line


async def _stored(here: Context, file_id: str) -> AsyncIterator[bytes]:
    try:
        async for line in _split(here.storage.stream(file_key(file_id))):
            yield line
    except FileNotFoundError:  # deleted or expired
        return


async def _split(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    rest = b""
    async for part in parts:
        *whole, rest = (rest + bytes(part)).split(b"\n")
        for line in whole:
            if line.strip():
                yield line
    if rest.strip():
        yield rest


def _line(line: dict[str, Any], ok: bool) -> Line:
    response, error = line.get("response") or {}, line.get("error") or {}
    body = response.get("body") or {}
    text = _said(body) if ok else (error.get("message") or (body.get("error") or {}).get("message") or "")
    status = str(response.get("status_code") or error.get("code") or "")
    return Line(line["custom_id"], ok, status, str(text)[:300])


def _said(body: dict[str, Any]) -> str:
    choices = body.get("choices") or [{}]
    first = choices[0] if isinstance(choices, list) and choices else {}
    return (first.get("message") or {}).get("content") or first.get("text") or json.dumps(body, ensure_ascii=False)
