"""Puts a batch's answer lines into the order of its input, by way of a temporary file: memory cannot hold them all."""

import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import IO

import numpy as np

ABSENT = np.uint64((1 << 64) - 1)


class InputOrder(AbstractContextManager["InputOrder"]):
    """Takes lines by request number in any order (`add`) and yields them sorted (`lines`); 13 bytes of memory each."""

    def __init__(self, requests: int) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile(prefix="batchweave-")  # noqa: SIM115
        self._at = np.full(requests, ABSENT, dtype=np.uint64)
        self._length = np.zeros(requests, dtype=np.uint32)
        self._ok = np.zeros(requests, dtype=np.bool_)
        self._end = 0

    def add(self, request: int, line: bytes, ok: bool) -> None:
        self._file.write(line)
        self._at[request], self._length[request], self._ok[request] = self._end, len(line), ok
        self._end += len(line)

    def lines(self) -> Iterator[tuple[bytes, bool]]:
        """Yield each line that was added, and whether it is a success."""
        for request in np.flatnonzero(self._at != ABSENT).tolist():
            self._file.seek(int(self._at[request]))
            yield self._file.read(int(self._length[request])), bool(self._ok[request])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
