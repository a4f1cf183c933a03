"""Says which requests of a window's order a slice has: consecutive ones, until some are handed over."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

OFFSET = np.dtype("<u4")


@dataclass(frozen=True, slots=True)
class Part:
    """Requests that become a slice: their places in the window's order, rising, and their number by batch."""

    places: NDArray[np.int64]
    batches: dict[str, int]


def places_of(first: int, count: int, offsets: bytes | None) -> NDArray[np.int64]:
    """Return the places of a slice's requests in the window's order, from its row's columns."""
    return first + (np.arange(count) if offsets is None else np.frombuffer(offsets, dtype=OFFSET).astype(np.int64))


def offsets_of(first: int, places: Sequence[int] | NDArray[np.int64]) -> bytes:
    """Return the column for these places."""
    return (np.asarray(places, dtype=np.int64) - first).astype(OFFSET).tobytes()
