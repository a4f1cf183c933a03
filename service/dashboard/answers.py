"""The requests of a batch with what came of them, searched in its files: bounded, since a file may have millions."""

import json
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from service.api.content import answered_so_far
from service.api.context import Context
from service.db.moves import LIVE
from service.db.tables import Batch, OutputOrder
from service.storage import LineTooLong, file_key, lines_of

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
    async for raw in _results(here, batch, kind == "output"):
        read += len(raw)
        line = parsed(raw)
        if read > MOST_BYTES or line is None:
            return Found(lines, False)
        if text in (line.get("custom_id") or ""):
            if len(lines) == SHOWN:
                return Found(lines, False)
            lines.append(_line(line, kind == "output"))
    return Found(lines, True)


async def request_of(here: Context, batch: Batch, custom_id: str) -> tuple[str | None, str | None]:
    """A request as it was sent, and its answer, as JSON for people; None for what is not found within bounds."""
    asked = await _one(stored_lines(here, batch.input_file_id), custom_id)
    answer = await _one(_results(here, batch, True), custom_id) or await _one(_results(here, batch, False), custom_id)
    return asked, answer


async def stored_lines(here: Context, file_id: str) -> AsyncIterator[bytes]:
    """Lines of a file, blank ones left out, up to the first that is too long; none of a file that is gone."""
    async for line in _plain(here.storage.lines(file_key(file_id), here.settings.max_line_bytes)):
        yield line


def parsed(raw: bytes) -> dict[str, Any] | None:
    """A line's object; None for anything else, as in a file that failed its validation."""
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


async def _one(lines: AsyncIterator[bytes], custom_id: str) -> str | None:
    read = 0
    wanted = [json.dumps(custom_id, ensure_ascii=each).encode(errors="surrogatepass") for each in (True, False)]
    async for raw in lines:
        read += len(raw)
        if read > MOST_BYTES:
            return None
        if any(each in raw for each in wanted):
            line = parsed(raw)
            if line is not None and line.get("custom_id") == custom_id:
                return json.dumps(line, indent=2, ensure_ascii=False)[:MOST_CHARACTERS]
    return None


async def _results(here: Context, batch: Batch, is_output: bool) -> AsyncIterator[bytes]:
    """Of the finished file, or what is answered so far."""
    file_id = batch.output_file_id if is_output else batch.error_file_id
    if file_id is not None:
        async for line in stored_lines(here, file_id):
            yield line
    elif batch.status in LIVE and batch.output_order == OutputOrder.ANY:
        async for line in _plain(lines_of(answered_so_far(here, batch.id, is_output), MOST_BYTES)):
            yield line


async def _plain(lines: AsyncIterator[tuple[int, bytes]]) -> AsyncIterator[bytes]:
    """Without blank ones; none of a file that is deleted or expired."""
    with suppress(FileNotFoundError, LineTooLong):
        async for _, line in lines:
            if line.strip():
                yield line


def _line(line: dict[str, Any], ok: bool) -> Line:
    response, error = line.get("response") or {}, line.get("error") or {}
    body = response.get("body") or {}
    text = _said(body) if ok else (error.get("message") or (body.get("error") or {}).get("message") or "")
    status = str(response.get("status_code") or error.get("code") or "")
    return Line(line.get("custom_id") or "", ok, status, str(text)[:300])


def _said(body: dict[str, Any]) -> str:
    choices = body.get("choices") or [{}]
    first = choices[0] if isinstance(choices, list) and choices else {}
    return (first.get("message") or {}).get("content") or first.get("text") or json.dumps(body, ensure_ascii=False)
