"""The prompts of a window as arrays, so that a hundred thousand of them are a few objects."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Prompts:
    """Token ids of all prompts end to end: prompt i is `tokens[starts[i]:starts[i + 1]]`.

    `tokens`: uint32 [sum of prompt lengths]; `starts`: int64 [prompts + 1], not decreasing.
    """

    tokens: TokenIds
    starts: NDArray[np.int64]

    def __post_init__(self) -> None:
        if len(self.starts) == 0 or self.starts[0] != 0 or self.starts[-1] != len(self.tokens):
            raise ValueError("starts must begin at 0 and end at the number of tokens")
        if np.any(np.diff(self.starts) < 0):
            raise ValueError("starts must not decrease")

    @classmethod
    def of(cls, prompts: Iterable[Iterable[int]]) -> "Prompts":
        parts = [np.asarray(list(prompt), dtype=np.uint32) for prompt in prompts]
        starts = np.zeros(len(parts) + 1, dtype=np.int64)
        np.cumsum([len(part) for part in parts], out=starts[1:])
        return cls(np.concatenate([np.empty(0, np.uint32), *parts]), starts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, i: int) -> TokenIds:
        return self.tokens[self.starts[i] : self.starts[i + 1]]
