"""When an answer that grows is a loop."""

from array import array

import numpy as np
import pytest

from engine_ext.plugin.repeats import EVERY, LEAST, LONGEST, REPEATS, Repeat, repeat_of


def stop_of(ids: "array[int]") -> tuple[int, int]:
    """Return at how many tokens the engine stops, 0 for never, and how often it looks."""
    at, looks = LEAST, 0
    while at <= len(ids):
        found, looks = repeat_of(ids[:at]), looks + 1
        if found.due_in == 0:
            return at, looks
        at += min(found.due_in, EVERY)
    return 0, looks


def noise(rng: np.random.Generator, tokens: int) -> "array[int]":
    return array("q", rng.integers(0, 50_000, tokens).tolist())


@pytest.mark.parametrize("period", [1, 2, 3, 7, 16, 17, 31, 64, 100, 128, 199, LONGEST])
def test_a_loop_is_stopped_soon(period: int) -> None:
    for seed in range(10):
        rng = np.random.default_rng(seed)
        before, row = noise(rng, int(rng.integers(0, 500))), noise(rng, period)
        stop, looks = stop_of(before + row * (2 * LEAST // period + 3 * REPEATS))
        threshold = len(before) + max(LEAST, REPEATS * period)
        assert threshold <= stop <= max(threshold + 3 * period, 2 * LEAST)
        assert looks <= stop // 20


def test_a_row_that_repeats_in_itself_is_part_of_a_longer_loop() -> None:
    rng = np.random.default_rng(1)
    row = noise(rng, 40) + array("q", [7]) * 24  # a table's line of dashes, always where the engine looks
    assert stop_of(row * 40)[0]


@pytest.mark.parametrize(
    "ids",
    [
        array("q"),
        array("q", [5] * (LEAST - 1)),  # such as the zeros of a googol
        array("q", range(10_000)),
        array("q", [9, *range(30)] * (REPEATS - 1)),
        array("q", [token for row in range(200) for token in (*range(20), row, 99)]),  # a table whose rows differ
        array("q", [*range(LONGEST + 1)] * 20),
    ],
)
def test_what_repeats_less_is_not_stopped(ids: "array[int]") -> None:
    assert stop_of(ids)[0] == 0


def test_zeros_within_tokens_are_no_repeat() -> None:
    """Of tokens as 64-bit numbers, most bytes are zeros."""
    assert stop_of(array("q", [0] * 127 + [256]) * 3 + array("q", range(1000)))[0] == 0


def test_a_repeat_says_how_far_it_is() -> None:
    assert repeat_of(array("q", range(500))) == Repeat(0, 0, EVERY)
    assert repeat_of(array("q", [*range(100), *[3, 4] * 50])) == Repeat(2, 100, LEAST)
    assert repeat_of(array("q", [3, 4] * 500)).due_in == 0
    # Bytes that look alike across the borders of tokens are no repeat.
    assert repeat_of(array("q", [1 << 8 * (number % 8) for number in range(40)])).period in (0, 8)
