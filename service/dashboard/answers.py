"""Searches a batch's files for requests and their answers, within bounds, since a file may have millions of lines."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from service.api.content import answered_so_far
from service.api.context import Context
from service.db.moves import LIVE
from service.db.tables import Batch, File, OutputOrder
from service.objects.storage import file_key
from service.requests.files import BYTE_ORDER_MARK

SHOWN = 50
MOST_BYTES = 64 * 1024 * 1024
MOST_OF_FIRST, MOST_OF_PARSED, MOST_OF_LINE = 1024 * 1024, 256 * 1024, 16 * 1024 * 1024
MOST_OF_TEXT = 300  # bytes shown of a line with an error
MOST_CHARACTERS = 20_000  # shown of one request or answer

_searches: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by project


class _Named(msgspec.Struct):
    custom_id: str | None = None


class _Url(msgspec.Struct):
    url: str | None = None


_name = msgspec.json.Decoder(_Named)  # skips the rest of a line; parsing it into Python objects would take seconds
_url = msgspec.json.Decoder(_Url)


@dataclass(frozen=True, slots=True)
class Line:
    custom_id: str
    ok: bool
    status: str
    text: str


@dataclass(frozen=True, slots=True)
class Found:
    """The lines that a search found. `all_searched`: whether the search covered everything there is."""

    lines: list[Line]
    all_searched: bool


async def search(context: Context, batch: Batch, kind: str, text: str) -> Found:
    """Return the first lines of `kind` (output or errors) whose custom_id contains `text`."""
    lines: list[Line] = []
    cut_off = False

    def look(raw: bytes) -> bool:
        nonlocal cut_off
        name = _named(raw)
        if name is not None and text in name:
            cut_off = len(lines) == SHOWN
            if not cut_off:
                lines.append(_line(parsed(raw) or {"custom_id": name}, kind == "output"))
        return cut_off or name is None

    all_seen = await _look_through(batch, _results(context, batch, kind == "output"), look)
    return Found(lines, all_seen)


async def request_of(context: Context, batch: Batch, custom_id: str) -> tuple[str | None, str | None]:
    """Return a request as it was sent and its answer, as indented JSON; None for either if not found within bounds."""
    asked = await _one(batch, context.storage.stream(file_key(batch.input_file_id)), custom_id)
    answer = await _one(batch, _results(context, batch, True), custom_id)
    return asked, answer or await _one(batch, _results(context, batch, False), custom_id)


async def lines_of(context: Context, batch: Batch, numbers: set[int]) -> dict[int, str]:
    """Return the beginnings of these lines of the input file by number, from 1 on, as far as they are in bounds."""
    found: dict[int, str] = {}
    number = 0

    def look(raw: bytes) -> bool:
        nonlocal number
        number += 1
        if number in numbers:
            found[number] = raw[:MOST_OF_TEXT].decode(errors="replace")
        return len(found) == len(numbers)

    if numbers:
        await _look_through(batch, context.storage.stream(file_key(batch.input_file_id)), look, blank=True)
    return found


async def first_url(context: Context, file: File) -> str | None:
    """Return the `url` of the request on a file's first line; None if the line is too long or not a request."""
    with suppress(FileNotFoundError, msgspec.DecodeError, RecursionError):
        head = await context.storage.read_range(file_key(file.id), 0, min(file.size_bytes, MOST_OF_FIRST))
        return _url.decode(head.removeprefix(BYTE_ORDER_MARK).lstrip().partition(b"\n")[0]).url
    return None


def parsed(raw: bytes) -> dict[str, Any] | None:
    """Return the object on a line; None if the line is too long or holds anything else.

    A file that failed its validation may hold anything.
    """
    if len(raw) > MOST_OF_PARSED:
        return None
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _named(raw: bytes) -> str | None:
    """Return a line's custom_id, or "" if it has none; None if the line is not an object."""
    try:
        return _name.decode(raw).custom_id or ""
    except (msgspec.DecodeError, RecursionError):
        return None


async def _one(batch: Batch, parts: AsyncIterator[bytes], custom_id: str) -> str | None:
    wanted = [json.dumps(custom_id, ensure_ascii=each).encode(errors="surrogatepass") for each in (True, False)]
    found: str | None = None

    def look(raw: bytes) -> bool:
        nonlocal found
        if any(each in raw for each in wanted) and _named(raw) == custom_id:
            line = parsed(raw)
            cut = raw[:MOST_CHARACTERS].decode(errors="replace")
            found = json.dumps(line, indent=2, ensure_ascii=False)[:MOST_CHARACTERS] if line else cut
        return found is not None

    await _look_through(batch, parts, look)
    return found


async def _look_through(
    batch: Batch, parts: AsyncIterator[bytes], look: Callable[[bytes], bool], blank: bool = False
) -> bool:
    """Pass each line to `look` until it has seen enough. Return whether it saw all lines, within the bounds on reading.

    `look` runs in a thread, one per project at a time, since a file may have a million lines to parse. It gets
    blank lines only if they are wanted.
    """
    read, rest = 0, b""
    lock = _searches.setdefault(batch.project_id, asyncio.Lock())
    with suppress(FileNotFoundError):  # the file was deleted or has expired
        async with lock:
            async for part in parts:
                read += len(part)
                whole, cut, rest = (rest + part).rpartition(b"\n")
                if cut and await asyncio.to_thread(_look_at, whole, look, blank):
                    return False
                if read > MOST_BYTES or len(rest) > MOST_OF_LINE:
                    return False
            return not await asyncio.to_thread(_look_at, rest, look, blank)
    return True


def _look_at(text: bytes, look: Callable[[bytes], bool], blank: bool) -> bool:
    """Return whether `look` has seen enough after one of these lines."""
    return any(look(line) for line in text.split(b"\n") if blank or not (line == b"" or line.isspace()))


async def _results(context: Context, batch: Batch, is_output: bool) -> AsyncIterator[bytes]:
    """Yield the contents of the finished file, or the answers so far."""
    file_id = batch.output_file_id if is_output else batch.error_file_id
    if file_id is not None:
        async for part in context.storage.stream(file_key(file_id)):
            yield part
    elif batch.status in LIVE and batch.output_order == OutputOrder.ANY:
        async for part in answered_so_far(context, batch.id, is_output):
            yield part


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
