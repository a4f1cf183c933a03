"""Keeps which answers of a batch are not ok, by their custom_ids' digests, for a retry by outcome."""

import asyncio
from array import array
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from service.objects.shards import Answer, Outcome
from service.objects.storage import Storage
from service.requests.custom_ids import Names, digest_of
from service.requests.lines import custom_id_of

CODES = {Outcome.CUT_OFF: 1, Outcome.INVALID: 2, Outcome.REFUSED: 3, Outcome.LOOPED: 4}  # as they are stored
ROW = np.dtype([("name", "<u8"), ("outcome", "u1")])


def folder_of(batch_id: str) -> str:
    return f"outcomes/{batch_id}"


def _key(batch_id: str, output_file_id: str) -> str:
    """Return the key, which names the file: of two finalizers, the later one may have seen fewer answers."""
    return f"{folder_of(batch_id)}/{output_file_id}"


@dataclass(slots=True)
class BadAnswers:
    """The answers of one batch that are not ok, in nine bytes each."""

    names: "array[int]" = field(default_factory=lambda: array("Q"))
    outcomes: bytearray = field(default_factory=bytearray)

    def add(self, answer: Answer) -> None:
        if answer.ok and answer.outcome:
            self.names.append(digest_of(custom_id_of(bytes(answer.line))))
            self.outcomes.append(CODES[answer.outcome])

    async def write(self, storage: Storage, batch_id: str, output_file_id: str) -> None:
        """Write them, if there are any."""
        if self.names:
            rows = np.empty(len(self.names), dtype=ROW)
            rows["name"], rows["outcome"] = self.names, np.frombuffer(self.outcomes, dtype=np.uint8)
            await storage.put(_key(batch_id, output_file_id), rows.tobytes())


async def bad_answers(
    storage: Storage, batch_id: str, output_file_id: str | None, outcomes: Collection[Outcome]
) -> Names:
    """Return the custom_ids of the batch's answers with these outcomes. Raises FileNotFoundError."""
    data = await storage.read(_key(batch_id, output_file_id or ""))
    return await asyncio.to_thread(_chosen, data, [CODES[each] for each in outcomes])


def _chosen(data: bytes, codes: list[int]) -> Names:
    rows = np.frombuffer(data, dtype=ROW)
    names: NDArray[np.uint64] = rows["name"][np.isin(rows["outcome"], codes)]
    return Names(names)
