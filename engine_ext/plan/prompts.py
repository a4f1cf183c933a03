"""Holds the prompts of a window as arrays, so that a million of them are a few objects."""

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine_ext.errors import InputError, SegmentError

TokenIds = NDArray[np.uint32]
Segment = tuple[str | int, int]
_BEYOND_VOCABULARY = 1 << 31


def first_token(token: int, space: str) -> int:
    """Return a number to replace a prompt's first token, so that prompts of different spaces share no prefix.

    Those of one space share what they did. `space`: whose requests share a KV cache, such as a LoRA adapter's.
    """
    return token ^ (zlib.crc32(space.encode()) | _BEYOND_VOCABULARY)


@dataclass(frozen=True, slots=True)
class Prompts:
    """All prompts end to end: prompt i is `tokens[starts[i]:starts[i + 1]]`.

    `tokens` is uint32 [sum of prompt lengths], token ids; `starts` is int64 [prompts + 1], never decreasing. Where only
    the identity of content is known, an element of `tokens` is a whole segment of `sizes` tokens; `sizes` is int64 with
    the shape of `tokens`.
    """

    tokens: TokenIds
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        if len(self.starts) == 0 or self.starts[0] != 0 or self.starts[-1] != len(self.tokens):
            raise InputError("starts must begin at 0 and end at the number of tokens")
        if np.any(np.diff(self.starts) < 0):
            raise InputError("starts must not decrease")
        if self.sizes is not None and (len(self.sizes) != len(self.tokens) or np.any(self.sizes < 1)):
            raise InputError("sizes must give every segment at least one token")

    @classmethod
    def of(cls, prompts: Iterable[Iterable[int]]) -> "Prompts":
        parts = [np.asarray(list(prompt), dtype=np.uint32) for prompt in prompts]
        return cls(np.concatenate([np.empty(0, np.uint32), *parts]), _starts([len(part) for part in parts]))

    @classmethod
    def of_segments(cls, prompts: Iterable[Sequence[Segment]]) -> "Prompts":
        """Build prompts from (id, length) pairs; equal ids at equal depth are equal content. Raises SegmentError."""
        names: dict[str | int, int] = {}
        said: dict[tuple[str | int, int], tuple[int, int]] = {}
        tokens: list[int] = []
        sizes: list[int] = []
        counts: list[int] = []
        for number, prompt in enumerate(prompts):
            depth = 0
            for name, size in prompt:
                if size < 1:
                    raise SegmentError(number, f"segment {name!r:.60} has the length {size}; it must be at least 1")
                first, known = said.setdefault((name, depth), (number, size))
                if known != size:
                    raise SegmentError(
                        number,
                        f"segment {name!r:.60} at depth {depth} has the length {size}, but {known} before; "
                        "equal ids at equal depth are equal content",
                        first,
                    )
                tokens.append(names.setdefault(name, len(names)))
                sizes.append(size)
                depth += size
            if depth == 0:
                raise SegmentError(number, "there are no segments; a prompt needs at least one")
            counts.append(len(prompt))
        return cls(np.array(tokens, dtype=np.uint32), _starts(counts), np.array(sizes, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, i: int) -> TokenIds:
        return self.tokens[self.starts[i] : self.starts[i + 1]]

    def chosen(self, those: NDArray[np.int64]) -> "Prompts":
        """Return the prompts at these places, in this order."""
        counts = np.diff(self.starts)[those]
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        places = np.repeat(self.starts[those] - starts[:-1], counts) + np.arange(starts[-1])
        return Prompts(self.tokens[places], starts, None if self.sizes is None else self.sizes[places])

    def kept_apart(self, spaces: Sequence[str], of: NDArray[np.int64]) -> "Prompts":
        """Return the prompts so that those of different spaces share no prefix; prompt i is of `spaces[of[i]]`.

        Their first tokens are no token ids any more (`first_token`).
        """
        masks = np.array([first_token(0, each) for each in spaces], dtype=np.uint32)
        tokens, some = self.tokens.copy(), np.diff(self.starts) > 0
        tokens[self.starts[:-1][some]] ^= masks[of[some]]
        return Prompts(tokens, self.starts, self.sizes)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return the tokens of each prompt; int64 [prompts]."""
        if self.sizes is None:
            return np.diff(self.starts)
        sums = np.concatenate([[0], np.cumsum(self.sizes)])
        return sums[self.starts[1:]] - sums[self.starts[:-1]]


def _starts(counts: list[int]) -> NDArray[np.int64]:
    starts = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts
