"""The index of a batch's requests: fixed-size records in object storage, not rows in SQL.

A batch of millions of lines costs the database one row, and any run of records is one range read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import update

from service.db.sessions import Database
from service.db.tables import Batch, BatchStatus
from service.objects.storage import LATE_S, Storage

# Offset and length of the line in the input file, its 1-based number, its prompt's place in the token object, and what
# the request says about the length of its answer (AskedOutput.packed).
RECORD = np.dtype(
    [("offset", "<u8"), ("length", "<u4"), ("line", "<u4"), ("tokens_at", "<u8"), ("tokens", "<u4"), ("asked", "<u4")]
)

# By what the lengths of answers are remembered (requests/likeness.py); an object of its own, which older indexes lack.
KEYS = np.dtype("<i8")
KEYS_BYTES = 2 * KEYS.itemsize  # of one request

GAP_BYTES = 64 * 1024  # between parts of an index that are read as one: an index is small, and each request costs

Records = NDArray[np.void]


class IndexGone(FileNotFoundError):
    """An object of the index is not there."""

    def __init__(self, index_id: str) -> None:
        super().__init__(f"the index {index_id} is gone")
        self.index_id = index_id


async def forget_index(database: Database, gone: IndexGone, now: float) -> None:
    """Let the validator write a new index for a running batch, unless the store may only be late."""
    theirs = (Batch.index_id == gone.index_id) & (Batch.status == BatchStatus.IN_PROGRESS)
    async with database.write() as session:
        is_old = Batch.in_progress_at < now - LATE_S
        await session.execute(update(Batch).where(theirs, is_old).values(index_id=None, preview=None))


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
        """Return records [first, first + count). This and the next ones raise IndexGone."""
        return await self._records([first], [count])

    async def pick(self, numbers: NDArray[np.int64]) -> Records:
        """Return the records of these requests, in this order."""
        return await self._records(numbers.tolist(), [1] * len(numbers))

    async def _records(self, firsts: Sequence[int], counts: Sequence[int]) -> Records:
        size = RECORD.itemsize
        parts = await self._read(self.records_key, [each * size for each in firsts], [each * size for each in counts])
        return np.frombuffer(b"".join(parts), dtype=RECORD)

    async def _read(self, key: str, starts: Sequence[int], lengths: Sequence[int]) -> list[bytes]:
        try:
            return await self.storage.read_ranges(key, starts, lengths, GAP_BYTES)
        except FileNotFoundError as error:
            raise IndexGone(self.index_id) from error

    async def keys(self, firsts: Sequence[int], counts: Sequence[int]) -> NDArray[np.int64]:
        """Return the keys of these runs of requests; int64 [requests, 2], zeros where there are none."""
        starts, sizes = [first * KEYS_BYTES for first in firsts], [count * KEYS_BYTES for count in counts]
        try:
            parts = await self.storage.read_ranges(self.keys_key, starts, sizes, GAP_BYTES)
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
        parts = await self._read(self.tokens_key, (starts[firsts] * 4).tolist(), sizes.tolist())
        return np.frombuffer(b"".join(parts), dtype="<u4").astype(np.uint32, copy=False)
