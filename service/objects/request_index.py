"""The index of a batch's requests: fixed-size records in object storage, not rows in SQL.

A batch of millions of lines costs the database one row, and any run of records is one range read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from service.objects.storage import Storage

# Offset and length of the line in the input file, its 1-based number, its prompt's place in the token object, and what
# the request says about the length of its answer (AskedOutput.packed).
RECORD = np.dtype(
    [("offset", "<u8"), ("length", "<u4"), ("line", "<u4"), ("tokens_at", "<u8"), ("tokens", "<u4"), ("asked", "<u4")]
)

# By what the lengths of answers are remembered (requests/likeness.py); an object of its own, which older indexes lack.
KEYS = np.dtype("<i8")
KEYS_BYTES = 2 * KEYS.itemsize  # of one request

Records = NDArray[np.void]


@dataclass(frozen=True, slots=True)
class RequestIndex:
    """The records of one batch, one per request, in the order of the file. Each validation writes a new index."""

    storage: Storage
    index_id: str

    @property
    def folder(self) -> str:
        return f"indexes/{self.index_id}"

    @property
    def records_key(self) -> str:
        return f"{self.folder}/records"

    @property
    def tokens_key(self) -> str:
        return f"{self.folder}/tokens"

    @property
    def keys_key(self) -> str:
        return f"{self.folder}/keys"

    async def read(self, first: int, count: int) -> Records:
        """Return records [first, first + count)."""
        size = RECORD.itemsize
        data = await self.storage.read_range(self.records_key, first * size, count * size)
        return np.frombuffer(data, dtype=RECORD)

    async def pick(self, numbers: NDArray[np.int64]) -> Records:
        """Return the records of these requests, in this order."""
        size = RECORD.itemsize
        parts = await self.storage.read_ranges(
            self.records_key, [int(n) * size for n in numbers], [size] * len(numbers)
        )
        return np.frombuffer(b"".join(parts), dtype=RECORD)

    async def keys(self, firsts: Sequence[int], counts: Sequence[int]) -> NDArray[np.int64]:
        """Return the keys of these runs of requests; int64 [requests, 2], zeros where there are none."""
        starts, sizes = [first * KEYS_BYTES for first in firsts], [count * KEYS_BYTES for count in counts]
        try:
            parts = await self.storage.read_ranges(self.keys_key, starts, sizes)
        except FileNotFoundError:
            return np.zeros((sum(counts), 2), dtype=np.int64)
        return np.frombuffer(b"".join(parts), dtype=KEYS).reshape(-1, 2)

    async def token_ids(self, records: Records) -> NDArray[np.uint32]:
        """Return the prompt tokens of these records, concatenated; those of consecutive records are read at once."""
        if len(records) == 0:
            return np.empty(0, np.uint32)
        starts, lengths = records["tokens_at"].astype(np.int64), records["tokens"].astype(np.int64)
        firsts = np.flatnonzero(np.concatenate([[True], starts[1:] != starts[:-1] + lengths[:-1]]))
        sizes = np.add.reduceat(lengths, firsts) * 4
        parts = await self.storage.read_ranges(self.tokens_key, (starts[firsts] * 4).tolist(), sizes.tolist())
        return np.frombuffer(b"".join(parts), dtype="<u4").astype(np.uint32, copy=False)
