"""Object storage and a database as bad as real ones, around the service's own classes, told by files in a folder.

Listings are always late: they show an object only after up to a minute. `lose`: the next segment, plan or index is
acknowledged and not stored; `unavailable`: three calls of ten fail, before or after they did what was asked; `back`:
the next commit of a planner or worker is undone after it was reported, as by a failover to a replica that was behind.
"""

import contextlib
import random
import time
import zlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from service.db.sessions import Database
from service.jobs import finalizer
from service.objects import request_index
from service.objects.storage import Storage
from service.worker import slice_requests

LATEST_S = 60  # after which a listing shows an object
LATE_S = 1.0  # for which the service waits for an object here
LOSES = ("shards/", "plans/", "indexes/")
FAILS = 0.3
CALLS = ("put", "read", "read_small", "read_range", "read_ranges", "has", "modified")


def worsen(folder: Path, undoes: bool) -> None:
    """Make this process's storage and, if it `undoes` commits, its database a bad one."""
    for module in (finalizer, request_index, slice_requests):
        vars(module)["LATE_S"] = LATE_S
    _list_late()
    _lose(folder)
    _fail(folder)
    if undoes:
        _undo(folder)


def _taken(folder: Path, kind: str) -> bool:
    """Whether this is the one call to which it happens; the folder has word of it then."""
    try:
        (folder / kind).unlink()
    except FileNotFoundError:
        return False
    (folder / f"{kind}-{time.monotonic_ns()}").touch()
    return True


def _list_late() -> None:
    modified, now = Storage.modified, time.time

    async def late(self: Storage, prefix: str) -> dict[str, float]:
        found = await modified(self, prefix)
        return {key: at for key, at in found.items() if now() - at > zlib.crc32(key.encode()) % LATEST_S}

    Storage.modified = late  # type: ignore[method-assign]


def _lose(folder: Path) -> None:
    put, writer = Storage.put, Storage.writer

    async def losing_put(self: Storage, key: str, data: bytes) -> None:
        if not (key.startswith(LOSES) and _taken(folder, "lose")):
            await put(self, key, data)

    @asynccontextmanager
    async def losing_writer(self: Storage, key: str, *given: Any) -> AsyncGenerator[Any, None]:
        async with writer(self, key, *given) as to:
            yield to
        if key.startswith(LOSES) and _taken(folder, "lose"):
            await self.delete(key)

    Storage.put, Storage.writer = losing_put, losing_writer  # type: ignore[method-assign]


def _fail(folder: Path) -> None:
    def failing(name: str) -> None:
        original = getattr(Storage, name)

        async def call(self: Storage, *given: Any) -> Any:
            fails = (folder / "unavailable").exists() and random.random() < FAILS
            if fails and random.random() < 0.5:
                raise OSError("503: slow down")
            found = await original(self, *given)
            if fails:
                raise OSError("503: the answer was lost")
            return found

        setattr(Storage, name, call)

    for name in CALLS:
        failing(name)
    stream = Storage.stream

    async def failing_stream(self: Storage, *given: Any) -> AsyncIterator[bytes]:
        async for part in stream(self, *given):
            if (folder / "unavailable").exists() and random.random() < FAILS:
                raise OSError("503: slow down")
            yield part

    Storage.stream = failing_stream  # type: ignore[method-assign]


def _undo(folder: Path) -> None:
    write = Database.write

    @asynccontextmanager
    async def undoing(self: Database, *given: Any) -> AsyncGenerator[Any, None]:
        async with write(self, *given) as session:
            yield session
            if _taken(folder, "back"):
                with contextlib.suppress(Exception):
                    await session.flush()
                session.expunge_all()  # what was read stays readable, as after a commit
                await session.rollback()

    Database.write = undoing  # type: ignore[method-assign]
