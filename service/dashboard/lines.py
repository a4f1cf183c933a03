"""Reads the lines of a batch's files within bounds, since a file may have millions of them."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary

import msgspec
from sqlalchemy import select

from service.api.content import answered_so_far
from service.api.context import Context
from service.db.moves import LIVE
from service.db.tables import Batch, File, OutputOrder
from service.objects.storage import file_key
from service.requests.lines import nesting_fault

MOST_BYTES = 64 * 1024 * 1024  # of a file that one look reads
MOST_OF_PARSED, MOST_OF_LINE = 256 * 1024, 16 * 1024 * 1024

_searches: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by project


class _Named(msgspec.Struct):
    custom_id: str | None = None


_name = msgspec.json.Decoder(_Named)  # skips the rest of a line; parsing it into Python objects would take seconds


def parsed(raw: bytes, most: int = MOST_OF_PARSED) -> dict[str, Any] | None:
    """Return the object on a line; None if the line is too long or holds anything else.

    A file that failed its validation may hold anything.
    """
    if len(raw) > most or nesting_fault(raw):
        return None
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def named(raw: bytes) -> str | None:
    """Return a line's custom_id, or "" if it has none; None if the line is not an object."""
    try:
        return _name.decode(raw).custom_id or ""
    except (msgspec.DecodeError, RecursionError):
        return None


async def look_through(
    batch: Batch,
    parts: AsyncIterator[bytes],
    look: Callable[[int, bytes], bool],
    blank: bool = False,
    start: int = 0,
) -> bool:
    """Pass each line, and its first byte, to `look` until it has seen enough.

    Return whether it saw all lines, within the bounds on reading. `look` runs in a thread, one per project at a time,
    since a file may have a million lines to parse. It gets blank lines only if they are wanted. `start`: the byte at
    which the parts begin.
    """
    read, at, rest = 0, start, b""
    lock = _searches.setdefault(batch.project_id, asyncio.Lock())
    with suppress(FileNotFoundError):  # the file was deleted or has expired
        async with lock:
            async for part in parts:
                read += len(part)
                whole, cut, rest = (rest + part).rpartition(b"\n")
                if cut and await asyncio.to_thread(_look_at, at, whole, look, blank):
                    return False
                at += len(whole) + len(cut)
                if read > MOST_BYTES or len(rest) > MOST_OF_LINE:
                    return False
            return not await asyncio.to_thread(_look_at, at, rest, look, blank)
    return True


def _look_at(at: int, text: bytes, look: Callable[[int, bytes], bool], blank: bool) -> bool:
    """Return whether `look` has seen enough after one of these lines."""
    for line in text.split(b"\n"):
        if (blank or not (line == b"" or line.isspace())) and look(at, line):
            return True
        at += len(line) + 1
    return False


async def results(context: Context, batch: Batch, is_output: bool, start: int = 0) -> AsyncIterator[bytes]:
    """Yield the contents of the finished file from the byte `start` on, or the answers so far."""
    file_id = batch.output_file_id if is_output else batch.error_file_id
    if file_id is not None:
        async with context.database.read() as session:
            size = await session.scalar(select(File.size_bytes).where(File.id == file_id))
        if start < (size or 0):
            async for part in context.storage.stream(file_key(file_id), start):
                yield part
    elif batch.status in LIVE and batch.output_order == OutputOrder.ANY:
        async for part in answered_so_far(context, batch.id, is_output, start):
            yield part
