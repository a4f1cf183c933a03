"""Finds custom_ids that occur twice in a file, in constant memory, and holds many of them in little.

A set of ten million names would take a gigabyte. Instead, hashes, which go to a temporary file once there are many,
tell which lines may repeat a name. The batch's file is then read again for the names on these lines only, so that a
hash collision never fails it.
"""

import tempfile
from array import array
from collections.abc import AsyncIterable, Iterator
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

ROW_BYTES = 16  # hash and line number
ROWS_AT_ONCE = 1 << 16
IN_MEMORY_BYTES = 8 * 1024 * 1024
PART_ROWS = 1 << 19  # compared with one another at a time

Rows = NDArray[np.int64]


class CustomIds:
    """Holds the custom_ids of a file by line number."""

    def __init__(self) -> None:
        self._written = tempfile.SpooledTemporaryFile(IN_MEMORY_BYTES, prefix="batchweave-")  # noqa: SIM115
        self._rows = array("q")
        self._count = 0

    def add(self, line: int, custom_id: str) -> None:
        """Add a line's custom_id; lines must come in file order."""
        self._rows.extend((hash(custom_id), line))
        self._count += 1
        if self._count % ROWS_AT_ONCE == 0:
            self._write()

    def suspects(self, most: int) -> frozenset[int]:
        """Return the file's first `most` lines that may repeat a custom_id, and the lines that they may repeat."""
        self._write()
        parts = 1 << (self._count // PART_ROWS).bit_length()
        found = np.empty((0, 2), np.int64)
        for part in range(parts):
            rows = np.empty((0, 2), np.int64)
            for block in self._read():
                rows = np.concatenate([rows, block[block[:, 0] & (parts - 1) == part]])
                if len(rows) > 2 * PART_ROWS:  # if some names occur very often
                    rows = _foremost(rows, most)
            found = np.concatenate([found, _repeats(rows)])
            found = found[np.argsort(found[:, 0])[:most]]
        return frozenset(found.ravel().tolist())

    def _write(self) -> None:
        self._written.write(self._rows.tobytes())
        self._rows = array("q")

    def _read(self) -> Iterator[Rows]:
        self._written.seek(0)
        while data := self._written.read(ROWS_AT_ONCE * ROW_BYTES):
            yield np.frombuffer(data, dtype=np.int64).reshape(-1, 2)


def _foremost(rows: Rows, most: int) -> Rows:
    """Return the rows that are the first with their hash, and the first `most` others; `rows` are in line order."""
    _, firsts = np.unique(rows[:, 0], return_index=True)
    others = np.setdiff1d(np.arange(len(rows)), firsts)[:most]
    return rows[np.sort(np.concatenate([firsts, others]))]


def _repeats(rows: Rows) -> Rows:
    """Return the lines whose hash occurred before, each with the first line that has it; int64 [repeats, 2]."""
    _, firsts, which = np.unique(rows[:, 0], return_index=True, return_inverse=True)
    first = firsts[which]
    repeats = np.flatnonzero(first != np.arange(len(rows)))
    return np.stack([rows[repeats, 1], rows[first[repeats], 1]], axis=1)


class Names:
    """A set of custom_ids in eight bytes each; of 10^7 others, one in a million such sets would hold one by chance."""

    def __init__(self, digests: NDArray[np.uint64]) -> None:
        self._digests = np.unique(digests)

    @classmethod
    async def of(cls, names: AsyncIterable[str]) -> "Names":
        digests = array("Q")
        async for name in names:
            digests.append(digest_of(name))
        return cls(np.frombuffer(digests, dtype=np.uint64))

    def __or__(self, other: "Names") -> "Names":
        return Names(np.concatenate([self._digests, other._digests]))

    def __len__(self) -> int:
        return len(self._digests)

    def __contains__(self, name: str) -> bool:
        digest = np.uint64(digest_of(name))
        at = int(np.searchsorted(self._digests, digest))
        return at < len(self._digests) and bool(self._digests[at] == digest)


def digest_of(name: str) -> int:
    """Return the same number in every process."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest())
