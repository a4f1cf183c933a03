"""Where each request of a batch stands: fixed-size records beside the batch's file, not rows in SQL.

A batch of millions of lines costs the database one row; any run of records is one range read.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from service.objects.storage import Storage

# offset and length of the line in the input file, its 1-based number, its prompt's place in the token object, and what
# it says of its answer's length (AskedOutput.packed)
RECORD = np.dtype(
    [("offset", "<u8"), ("length", "<u4"), ("line", "<u4"), ("tokens_at", "<u8"), ("tokens", "<u4"), ("asked", "<u4")]
)

Records = NDArray[np.void]


@dataclass(frozen=True, slots=True)
class RequestIndex:
    """The records of one batch, request by request in the order of the file; each validation writes its own."""

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

    async def read(self, first: int, count: int) -> Records:
        """Records [first, first + count)."""
        size = RECORD.itemsize
        data = await self.storage.read_range(self.records_key, first * size, count * size)
        return np.frombuffer(data, dtype=RECORD)

    async def pick(self, numbers: NDArray[np.int64]) -> Records:
        """The records of these requests, in this order."""
        size = RECORD.itemsize
        parts = await self.storage.read_ranges(
            self.records_key, [int(n) * size for n in numbers], [size] * len(numbers)
        )
        return np.frombuffer(b"".join(parts), dtype=RECORD)

    async def token_ids(self, records: Records) -> NDArray[np.uint32]:
        """Prompt tokens of consecutive records, end to end."""
        if len(records) == 0:
            return np.empty(0, np.uint32)
        start = int(records["tokens_at"][0])
        end = int(records["tokens_at"][-1]) + int(records["tokens"][-1])
        data = await self.storage.read_range(self.tokens_key, start * 4, (end - start) * 4)
        return np.frombuffer(data, dtype="<u4").astype(np.uint32, copy=False)
