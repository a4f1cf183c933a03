"""Object storage: a local folder by default, S3-class by URL, through obstore and always in streams."""

import asyncio
import errno
import os
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import unquote, urlparse

import obstore
from obstore.store import LocalStore, ObjectStore, from_url

PART_BYTES = 5 * 1024 * 1024
READ_BYTES = 1024 * 1024
RESERVE, MOST_RESERVE = 0.1, 1024**3  # of a disk that is kept from uploads and what is made of them
ANSWERS_RESERVE = 0.5  # of that, kept from answers too
CLOCK_KEY = "health/clock"


def file_key(file_id: str) -> str:
    """Where the bytes of a file of the API are."""
    return f"files/{file_id}"


def upload_folder(upload_id: str) -> str:
    """Where the parts of an upload wait for its completion."""
    return f"uploads/{upload_id}"


def part_key(upload_id: str, part_id: str) -> str:
    return f"{upload_folder(upload_id)}/{part_id}"


class LineTooLong(Exception):
    """A line of the object is longer than the reader allows."""

    def __init__(self, line: int) -> None:
        super().__init__(f"line {line} is too long")
        self.line = line


class Room(NamedTuple):
    """Bytes that are free on the store's disk, and how many of them are kept from uploads."""

    free_bytes: int
    reserve_bytes: int

    @property
    def is_short(self) -> bool:
        return self.free_bytes < self.reserve_bytes


class NoRoom(OSError):
    """What is left of the store's disk is kept for deletes, cancels and result files."""

    def __init__(self) -> None:
        super().__init__(errno.ENOSPC, "what is left of the disk is kept for deletes, cancels and result files")


class Writer(Protocol):
    async def write(self, data: bytes, /) -> Any: ...


class Storage:
    """Objects by key; a key is made by the service, never taken from a client."""

    def __init__(self, store: ObjectStore, folder: Path | None = None) -> None:
        self._store = store
        self._folder = folder  # of a local store, whose objects must be synced to disk

    @classmethod
    def open(cls, url: str) -> "Storage":
        """Open `file:///folder` (made when missing), `s3://bucket/prefix`, `gs://…` or `az://…`."""
        parsed = urlparse(url)
        if parsed.scheme != "file":
            return cls(from_url(url))
        folder = Path(unquote(parsed.path))
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return cls(LocalStore(folder, automatic_cleanup=True), folder)

    @asynccontextmanager
    async def writer(self, key: str) -> AsyncGenerator[Writer, None]:
        """Stream an object; it is there after the block, and not there when the block raises."""
        # Not put_async with a generator: obstore 0.12 can abort the interpreter at its exit after one.
        writer = obstore.open_writer_async(self._store, key, buffer_size=PART_BYTES, max_concurrency=2)
        try:
            try:
                yield writer
            finally:
                await writer.close()
            await self._sync(key)
        except BaseException:
            await self.delete(key)
            if self._folder is not None:  # what was staged, where closing failed
                for staged in (self._folder / key).parent.glob(f"{key.rsplit('/', 1)[-1]}#*"):
                    staged.unlink(missing_ok=True)
            raise

    async def put(self, key: str, data: bytes) -> None:
        """Write a small object in one atomic step; it is on disk when this returns."""
        await self._store.put_async(key, data, use_multipart=False)
        await self._sync(key)

    async def _sync(self, key: str) -> None:
        if self._folder is not None:
            await asyncio.to_thread(_sync_file, self._folder, key)

    async def read(self, key: str) -> bytes:
        """The whole object. Raises FileNotFoundError."""
        return bytes(await (await self._store.get_async(key)).bytes_async())

    async def read_range(self, key: str, start: int, length: int) -> bytes:
        if length == 0:
            return b""
        return bytes(await self._store.get_range_async(key, start=start, length=length))

    async def read_ranges(self, key: str, starts: Sequence[int], lengths: Sequence[int]) -> list[bytes]:
        if not starts:
            return []
        return [bytes(part) for part in await self._store.get_ranges_async(key, starts=starts, lengths=lengths)]

    async def stream(self, key: str, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        """The object's bytes [start, end) in chunks. Raises FileNotFoundError before the first chunk."""
        if end is not None:
            result = await self._store.get_async(key, options={"range": (start, end)})
        else:
            result = await self._store.get_async(key, options={"range": {"offset": start}} if start else {})
        async for chunk in result.stream(min_chunk_size=READ_BYTES):
            yield bytes(chunk)

    def lines(self, key: str, max_line_bytes: int) -> AsyncIterator[tuple[int, bytes]]:
        """Of an object, as `lines_of`."""
        return lines_of(self.stream(key), max_line_bytes)

    async def keys(self, prefix: str) -> list[str]:
        """Every key below `prefix/`, sorted."""
        return sorted(await self.modified(prefix))

    async def modified(self, prefix: str) -> dict[str, float]:
        """Every key below `prefix/` with the unix time of its last change."""
        found: dict[str, float] = {}
        async for page in self._store.list(prefix):
            found.update((meta["path"], meta["last_modified"].timestamp()) for meta in page)
        return found

    async def folders(self, prefix: str) -> list[str]:
        """Names of the folders directly below `prefix/`."""
        result = await self._store.list_with_delimiter_async(prefix)
        return [path.rsplit("/", 1)[-1] for path in result["common_prefixes"]]

    async def now(self) -> float:
        """Unix seconds by the store's own clock, which dates its objects; this host's may be another."""
        await self._store.put_async(CLOCK_KEY, b"", use_multipart=False)
        return (await self._store.head_async(CLOCK_KEY))["last_modified"].timestamp()

    async def delete(self, key: str) -> None:
        """Delete an object; one that is not there is no error."""
        with suppress(FileNotFoundError):
            await self._store.delete_async(key)

    async def delete_all(self, prefix: str) -> None:
        keys = await self.keys(prefix)
        with suppress(FileNotFoundError):
            await self._store.delete_async(keys)

    async def delete_staged(self, before: float) -> int:
        """Delete what a dead process began to write into a local store before this unix time, and count it.

        Listings leave it out. A bucket has rules of its own for uploads that were never completed.
        """
        return await asyncio.to_thread(_delete_staged, self._folder, before) if self._folder is not None else 0

    @property
    def room(self) -> "Room | None":
        """Of a local store; None where there is no disk to look at."""
        if self._folder is None:
            return None
        found = os.statvfs(self._folder)
        whole, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
        return Room(free, min(MOST_RESERVE, int(whole * RESERVE)))

    def check_room(self, more: int, reserve: float = 1.0) -> None:
        """Raise NoRoom unless so many bytes leave this part of the reserve."""
        room = self.room
        if room is not None and room.free_bytes - more < room.reserve_bytes * reserve:
            raise NoRoom

    async def check(self) -> None:
        """Raise when the store cannot be reached."""
        async for _ in self._store.list("health", chunk_size=1):
            return


def _delete_staged(folder: Path, before: float) -> int:
    staged = [path for path in folder.rglob("*#*") if path.is_file() and path.stat().st_mtime < before]
    for path in staged:
        path.unlink(missing_ok=True)
    return len(staged)


def _sync_file(folder: Path, key: str) -> None:
    """Have the operating system write the file to disk, and the entries of the folders that lead to it."""
    path = folder / key
    parents = path.parents[: len(path.relative_to(folder).parts)]
    for each in (path, *parents):
        opened = os.open(each, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


async def lines_of(parts: AsyncIterator[bytes], max_line_bytes: int) -> AsyncIterator[tuple[int, bytes]]:
    """Each line as (byte offset, bytes without the line feed). Raises LineTooLong."""
    offset, number, rest = 0, 1, b""
    async for part in parts:
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            if len(line) > max_line_bytes:
                raise LineTooLong(number)
            yield offset, line
            offset += len(line) + 1
            number += 1
        if len(rest) > max_line_bytes:
            raise LineTooLong(number)
    if rest:
        yield offset, rest
