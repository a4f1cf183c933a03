"""How times are said to people."""

import pytest

from batchweave.terminal import duration


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (-3, "0 s"),
        (0, "0 s"),
        (0.4, "< 1 s"),
        (1.9, "1 s"),
        (125, "2 min 5 s"),
        (3600, "1 h"),
        (7261, "2 h 1 min"),
        (273_600, "3 d 4 h"),
    ],
)
def test_a_duration_is_said_in_its_two_largest_units(seconds: float, said: str) -> None:
    assert duration(seconds) == said
