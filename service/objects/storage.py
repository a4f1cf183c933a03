"""Object storage through obstore, always in streams: a local folder by default, or an S3-class bucket by URL."""

import asyncio
import errno
import math
import os
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import unquote, urlparse

import numpy as np
import obstore
from obstore.store import LocalStore, ObjectStore, from_url

PART_BYTES = 5 * 1024 * 1024  # the smallest that stores take
MOST_PARTS = 10_000  # of one object, in stores of the S3 class
SPARE = 0.25  # of what is wanted, that may be read besides, to read more of it by one request
READ_BYTES = 1024 * 1024
PAGE = 500  # keys of a listing that are held at once
RESERVE, MOST_RESERVE = 0.1, 1024**3  # part of a disk that uploads and their indexes may not use
ANSWERS_RESERVE = 0.5  # part of the reserve that answers may not use either
CLOCK_KEY = "health/clock"
LATE_S = 120.0  # how long an object that was written may stay unseen, on stores that replicate or cache


def file_key(file_id: str) -> str:
    """Return the key of an API file's content."""
    return f"files/{file_id}"


def upload_folder(upload_id: str) -> str:
    """Return the folder that holds an upload's parts until it is completed."""
    return f"uploads/{upload_id}"


def part_key(upload_id: str, part_id: str) -> str:
    return f"{upload_folder(upload_id)}/{part_id}"


class LineTooLong(Exception):
    """A line of the object is longer than the reader allows."""

    def __init__(self, line: int) -> None:
        super().__init__(f"line {line} is too long")
        self.line = line


class Room(NamedTuple):
    """Free bytes on the store's disk, and how many bytes uploads must leave free."""

    free_bytes: int
    reserve_bytes: int

    @property
    def is_short(self) -> bool:
        return self.free_bytes < self.reserve_bytes


class NoRoom(OSError):
    """The remaining space on the store's disk is reserved for deletes, cancels and result files."""

    def __init__(self) -> None:
        super().__init__(errno.ENOSPC, "the remaining disk space is reserved for deletes, cancels and result files")


class Writer(Protocol):
    async def write(self, data: bytes, /) -> Any: ...


class Storage:
    """Stores objects by key. The service makes all keys; none comes from a client."""

    def __init__(self, store: ObjectStore, folder: Path | None = None) -> None:
        self._store = store
        self._folder = folder  # of a local store, whose objects must be synced to disk

    @classmethod
    def open(cls, url: str) -> "Storage":
        """Open `file:///folder` (created if missing), `s3://bucket/prefix`, `gs://…` or `az://…`."""
        parsed = urlparse(url)
        if parsed.scheme != "file":
            return cls(from_url(url))
        folder = Path(unquote(parsed.path))
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return cls(LocalStore(folder, automatic_cleanup=True), folder)

    @asynccontextmanager
    async def writer(self, key: str, most: int = 0) -> AsyncGenerator[Writer, None]:
        """Yield a writer that streams an object of at most `largest(most)` bytes.

        The object exists after the block, unless the block raises.
        """
        # Not put_async with a generator: obstore 0.12 can abort the interpreter at its exit after one.
        size = self._part_bytes(most)
        writer = obstore.open_writer_async(self._store, key, buffer_size=size, max_concurrency=2)
        try:
            try:
                yield writer
            finally:
                await writer.close()
            await self._sync(key)
        except BaseException:
            await self.delete(key)
            if self._folder is not None:  # staged files remain if closing failed
                for staged in (self._folder / key).parent.glob(f"{key.rsplit('/', 1)[-1]}#*"):
                    staged.unlink(missing_ok=True)
            raise

    def largest(self, most: int) -> float:
        """Return how many bytes an object can have whose writer was told `most`: 48 GiB at least."""
        return math.inf if self._folder is not None else MOST_PARTS * self._part_bytes(most)

    def _part_bytes(self, most: int) -> int:
        return PART_BYTES if self._folder is not None else max(PART_BYTES, -(-most // MOST_PARTS))

    async def put(self, key: str, data: bytes) -> None:
        """Write a small object in one atomic step; it is on disk when this returns."""
        await self._store.put_async(key, data, use_multipart=False)
        await self._sync(key)

    async def _sync(self, key: str) -> None:
        if self._folder is not None:
            await asyncio.to_thread(_sync_file, self._folder, key)

    async def read(self, key: str) -> bytes:
        """Return the whole object. Raises FileNotFoundError."""
        return bytes(await (await self._store.get_async(key)).bytes_async())

    async def has(self, key: str) -> bool:
        """Return whether the object is there."""
        try:
            await self._store.head_async(key)
        except FileNotFoundError:
            return False
        return True

    async def read_range(self, key: str, start: int, length: int) -> bytes:
        if length == 0:
            return b""
        return bytes(await self._store.get_range_async(key, start=start, length=length))

    async def read_ranges(self, key: str, starts: Sequence[int], lengths: Sequence[int], gap: int = 0) -> list[bytes]:
        """Return these ranges of an object; those at most `gap` bytes apart are read as one in any case."""
        if not starts:
            return []
        gap = max(gap, widest_gap(starts, lengths))
        parts = await self._store.get_ranges_async(key, starts=starts, lengths=lengths, coalesce=gap)
        return [bytes(part) for part in parts]

    async def read_small(self, key: str, most: int) -> bytes | None:
        """Return the whole object, or None if it has more than `most` bytes. Raises FileNotFoundError."""
        result = await self._store.get_async(key)
        return bytes(await result.bytes_async()) if result.meta["size"] <= most else None

    async def stream(
        self, key: str, start: int = 0, end: int | None = None, chunk_bytes: int = READ_BYTES
    ) -> AsyncIterator[bytes]:
        """Yield the object's bytes [start, end) in chunks. Raises FileNotFoundError before the first chunk."""
        if end is not None:
            result = await self._store.get_async(key, options={"range": (start, end)})
        else:
            result = await self._store.get_async(key, options={"range": {"offset": start}} if start else {})
        async for chunk in result.stream(min_chunk_size=chunk_bytes):
            yield bytes(chunk)

    def lines(self, key: str, max_line_bytes: float = math.inf) -> AsyncIterator[tuple[int, bytes]]:
        """Yield the lines of an object; see `lines_of`."""
        return lines_of(self.stream(key), max_line_bytes)

    async def keys(self, prefix: str) -> list[str]:
        """Return every key below `prefix/`, sorted."""
        return sorted(await self.modified(prefix))

    async def modified(self, prefix: str) -> dict[str, float]:
        """Return every key below `prefix/` with the Unix time of its last change."""
        found: dict[str, float] = {}
        async for page in self.pages(prefix):
            found |= page
        return found

    async def pages(self, prefix: str) -> AsyncIterator[dict[str, float]]:
        """Yield the keys below `prefix/`, a few at a time, with the Unix times of their last changes."""
        async for page in self._store.list(prefix, chunk_size=PAGE):
            yield {meta["path"]: meta["last_modified"].timestamp() for meta in page}

    async def folders(self, prefix: str) -> list[str]:
        """Return the names of the folders directly below `prefix/`."""
        result = await self._store.list_with_delimiter_async(prefix)
        return [path.rsplit("/", 1)[-1] for path in result["common_prefixes"]]

    async def now(self) -> float:
        """Return Unix seconds by the store's own clock, which dates its objects; this host's clock may differ."""
        await self._store.put_async(CLOCK_KEY, b"", use_multipart=False)
        return (await self._store.head_async(CLOCK_KEY))["last_modified"].timestamp()

    async def delete(self, key: str) -> None:
        """Delete an object; a missing object is not an error."""
        with suppress(FileNotFoundError):
            await self._store.delete_async(key)

    async def delete_all(self, prefix: str) -> None:
        keys = await self.keys(prefix)
        with suppress(FileNotFoundError):
            await self._store.delete_async(keys)

    async def delete_staged(self, before: float) -> int:
        """Delete files in a local store that dead processes staged before this Unix time. Returns how many.

        Listings do not show staged files. Buckets have their own rules for uploads that were never completed.
        """
        return await asyncio.to_thread(_delete_staged, self._folder, before) if self._folder is not None else 0

    @property
    def room(self) -> "Room | None":
        """Return the room on a local store's disk; None for a bucket, which has no disk to look at."""
        if self._folder is None:
            return None
        found = os.statvfs(self._folder)
        whole, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
        return Room(free, min(MOST_RESERVE, int(whole * RESERVE)))

    def check_room(self, more: int, reserve: float = 1.0) -> None:
        """Raise NoRoom if writing `more` bytes would not leave this part of the reserve free."""
        room = self.room
        if room is not None and room.free_bytes - more < room.reserve_bytes * reserve:
            raise NoRoom

    async def check(self) -> None:
        """Raise when the store cannot be reached."""
        async for _ in self._store.list("health", chunk_size=1):
            return


def widest_gap(starts: Sequence[int], lengths: Sequence[int]) -> int:
    """Return the gap between ranges up to which they are read as one, so that no more than `SPARE` is read besides.

    A store of the S3 class is paid by the request, and by the byte.
    """
    order = np.argsort(np.array(starts, dtype=np.int64), kind="stable")
    begin, size = np.array(starts, dtype=np.int64)[order], np.array(lengths, dtype=np.int64)[order]
    gaps = np.sort(np.maximum(begin[1:] - np.maximum.accumulate(begin + size)[:-1], 0))
    fits = np.searchsorted(np.cumsum(gaps), SPARE * size.sum(), side="right")  # the gaps before it
    # All gaps of one width are read, or none.
    if fits < len(gaps):
        fits = np.searchsorted(gaps, gaps[fits], side="left")
    return int(gaps[fits - 1]) if fits else 0


def _delete_staged(folder: Path, before: float) -> int:
    staged = [path for path in folder.rglob("*#*") if path.is_file() and path.stat().st_mtime < before]
    for path in staged:
        path.unlink(missing_ok=True)
    return len(staged)


def _sync_file(folder: Path, key: str) -> None:
    """Flush the file to disk, and the entries of the folders that lead to it."""
    path = folder / key
    parents = path.parents[: len(path.relative_to(folder).parts)]
    for each in (path, *parents):
        opened = os.open(each, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


async def lines_of(parts: AsyncIterator[bytes], max_line_bytes: float) -> AsyncIterator[tuple[int, bytes]]:
    """Yield each line as (byte offset, bytes without the line feed). Raises LineTooLong."""
    offset, number, rest, size = 0, 1, list[bytes](), 0  # `rest`: of a line whose end has not come yet
    async for part in parts:
        *whole, last = part.split(b"\n")
        for piece in whole:
            line, rest, size = b"".join([*rest, piece]), [], 0
            if len(line) > max_line_bytes:
                raise LineTooLong(number)
            yield offset, line
            offset += len(line) + 1
            number += 1
        rest.append(last)
        size += len(last)
        if size > max_line_bytes:
            raise LineTooLong(number)
    if size:
        yield offset, b"".join(rest)
