"""Turns the bytes of an uploaded file into UTF-8 lines: unpacks gzip, and refuses at once what cannot be JSONL."""

import zlib
from collections.abc import Awaitable, Callable
from typing import Any

from batchweave.files import BYTE_ORDER_MARK, GZIP
from service.errors import BadRequest, PayloadTooLarge

Sink = Callable[[bytes], Awaitable[object]]
MOST_UNPACKED = 64  # times as long as it was packed a file of requests may be, as far as its parts in a store know
UTF_16 = (b"\xff\xfe", b"\xfe\xff")
HEAD_BYTES = 4  # enough to recognize the kind of file
STEP_BYTES = 1024 * 1024  # unpacked at a time
LEAST_MEMBER, MOST_MEMBERS = 4096, 1000  # a smaller gzip member is tiny, and a file may have so many tiny ones


class PlainText:
    """Passes the text of a file to `sink`, at most `most` bytes of it."""

    def __init__(self, sink: Sink, most: int) -> None:
        self._sink, self._most = sink, most
        self._head = b""
        self._is_known = False
        self._gzip: Any = None  # a decompressor, which has no public name
        self._members = self._member_began = 0
        self.size_bytes = 0
        self._begin: bytes | None = b""  # of the text, until it is long enough to have a byte order mark

    def named(self, name: str) -> str:
        """Return the name of the file for its text, which is stored unpacked."""
        return name if self._gzip is None else name.removesuffix(".gz")

    async def write(self, data: bytes) -> None:
        """Add bytes of the file. Raises BadRequest if it cannot be JSONL, PayloadTooLarge if its text is too large."""
        if not self._is_known:
            self._head += data
            if len(self._head) < HEAD_BYTES:
                return
            data = self._look()
        await self._pass(data)

    async def end(self) -> None:
        """End the file. Raises BadRequest if it is empty or incomplete."""
        if not self._is_known:
            await self._pass(self._look())
        if self._begin:
            await self._start()
        if self._gzip is not None and not self._gzip.eof:
            raise BadRequest("The gzip file is cut off.", code="invalid_file", param="file")
        if not self.size_bytes:
            raise BadRequest("The file is empty.", code="empty_file", param="file")

    def _look(self) -> bytes:
        self._is_known, head = True, self._head
        if head[:2] in UTF_16:
            raise BadRequest("The file is UTF-16. Save it as UTF-8.", code="invalid_file", param="file")
        if head.removeprefix(BYTE_ORDER_MARK).lstrip()[:1] == b"[":
            message = "The file is a JSON array. A batch file has one request per line, without brackets around them."
            raise BadRequest(message, code="invalid_file", param="file")
        if head[:2] == GZIP:
            self._gzip = zlib.decompressobj(wbits=31)
        return head

    async def _pass(self, data: bytes) -> None:
        if self._gzip is None:
            await self._hand_on(data)
            return
        while data and not self._gzip.eof:
            try:
                text = self._gzip.decompress(data, STEP_BYTES)
            except zlib.error as error:
                raise BadRequest(f"The gzip file is damaged: {error}.", code="invalid_file", param="file") from error
            await self._hand_on(text)
            data = self._gzip.unconsumed_tail
            if self._gzip.eof and self._gzip.unused_data:  # several members, as in a log that was appended to
                data, self._gzip = self._gzip.unused_data, zlib.decompressobj(wbits=31)
                self._members += self.size_bytes - self._member_began < LEAST_MEMBER
                self._member_began = self.size_bytes
                if self._members > MOST_MEMBERS:
                    message = f"The gzip file has more than {MOST_MEMBERS} tiny members. Compress it as one."
                    raise BadRequest(message, code="invalid_file", param="file")

    async def _start(self) -> None:
        """Hand on how the text begins, without a byte order mark."""
        begin, self._begin = self._begin or b"", None
        await self._hand_on(begin.removeprefix(BYTE_ORDER_MARK))

    async def _hand_on(self, text: bytes) -> None:
        if self._begin is not None:
            self._begin += text
            if len(self._begin) >= len(BYTE_ORDER_MARK):
                await self._start()
            return
        self.size_bytes += len(text)
        if self.size_bytes > self._most:
            message = f"The file is larger than {self._most} bytes. Split it."
            raise PayloadTooLarge(message, code="file_too_large", param="file")
        if text:
            await self._sink(text)
