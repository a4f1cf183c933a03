"""Object storage: a local folder by default, S3-class by URL, through obstore and always in streams."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlparse

import obstore
from obstore.store import LocalStore, ObjectStore, from_url

PART_BYTES = 5 * 1024 * 1024
READ_BYTES = 1024 * 1024


class LineTooLong(Exception):
    """A line of the object is longer than the reader allows."""

    def __init__(self, line: int) -> None:
        super().__init__(f"line {line} is too long")
        self.line = line


class Writer(Protocol):
    async def write(self, data: bytes, /) -> Any: ...


class Storage:
    """Objects by key; a key is made by the service, never taken from a client."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    @classmethod
    def open(cls, url: str) -> "Storage":
        """Open `file:///folder` (made when missing), `s3://bucket/prefix`, `gs://…` or `az://…`."""
        parsed = urlparse(url)
        if parsed.scheme != "file":
            return cls(from_url(url))
        folder = Path(unquote(parsed.path))
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return cls(LocalStore(folder, automatic_cleanup=True))

    @asynccontextmanager
    async def writer(self, key: str) -> AsyncGenerator[Writer, None]:
        """Stream an object; it is there after the block, and not there when the block raises."""
        # Not put_async with a generator: obstore 0.12 can abort the interpreter at its exit after one.
        writer = obstore.open_writer_async(self._store, key, buffer_size=PART_BYTES, max_concurrency=2)
        try:
            yield writer
        except BaseException:
            await writer.close()
            await self.delete(key)
            raise
        await writer.close()

    async def put(self, key: str, data: bytes) -> None:
        """Write a small object in one atomic step."""
        await self._store.put_async(key, data, use_multipart=False)

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

    async def lines(self, key: str, max_line_bytes: int) -> AsyncIterator[tuple[int, bytes]]:
        """Each line as (byte offset, bytes without the line feed). Raises LineTooLong."""
        offset, number, rest = 0, 1, b""
        async for chunk in self.stream(key):
            *whole, rest = (rest + chunk).split(b"\n")
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

    async def size_bytes(self, key: str) -> int:
        return (await self._store.head_async(key))["size"]

    async def keys(self, prefix: str) -> list[str]:
        """Every key below `prefix/`, sorted."""
        found: list[str] = []
        async for page in self._store.list(prefix):
            found.extend(meta["path"] for meta in page)
        return sorted(found)

    async def delete(self, key: str) -> None:
        """Delete an object; one that is not there is no error."""
        with suppress(FileNotFoundError):
            await self._store.delete_async(key)

    async def delete_all(self, prefix: str) -> None:
        for key in await self.keys(prefix):
            await self.delete(key)

    async def check(self) -> None:
        """Raise when the store cannot be reached."""
        async for _ in self._store.list("health", chunk_size=1):
            return
