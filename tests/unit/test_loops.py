"""Which texts end in a loop."""

import pytest

from service.worker.loops import REPEATS, SCALES, period_of

SENTENCE = "So we try again, and this is not the answer. "
# A period with parts that repeat in themselves.
ROWS = "".join(f"| {name} | yes | yes | yes | yes |\n" for name in ("first", "second", "third", "fourth", "fifth"))
LONG = "".join(f"Step {number} is like the one before. " for number in range(25))


@pytest.mark.parametrize("period", ["0", "ab", SENTENCE, ROWS, LONG, "日本語です。"])
def test_a_text_that_repeats_itself_is_a_loop(period: str) -> None:
    times = max(REPEATS, SCALES[0] // len(period) + 2)
    begun = f"An answer begins. {period * times}"
    for cut in range(0, len(period), 7):  # it ends anywhere
        assert period_of(begun + period[:cut]) == len(period)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "short",
        "ha" * 30,
        "=" * SCALES[0],
        SENTENCE * (REPEATS - 1),
        LONG,
        SENTENCE * 20 + "But now it is something else.",
        "".join(f"{number}. the same words\n" for number in range(500)),
        "x" * 5000 + "y",
    ],
)
def test_other_texts_are_none(text: str) -> None:
    assert period_of(text) == 0
