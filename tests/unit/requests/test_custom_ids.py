"""Lines that may repeat a custom_id: all that do, the first ones of the file."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.requests import custom_ids
from service.requests.custom_ids import CustomIds

NAMES = st.lists(st.none() | st.integers(0, 40).map(str), max_size=120)  # None: a line that has none


def suspects(names: list[str | None], most: int) -> frozenset[int]:
    found = CustomIds()
    for line, name in enumerate(names, start=1):
        if name is not None:
            found.add(line, name)
    return found.suspects(most)


def repeats(names: list[str | None]) -> list[tuple[int, int]]:
    """Counted plainly: lines that repeat, and the first line that has the name."""
    first: dict[str, int] = {}
    pairs = [(line, first.setdefault(name, line)) for line, name in enumerate(names, start=1) if name is not None]
    return [(line, before) for line, before in pairs if line != before]


@given(NAMES, st.integers(1, 200))
def test_first_repeats_are_found_with_what_they_repeat(names: list[str | None], most: int) -> None:
    wanted = {line for pair in repeats(names)[:most] for line in pair}
    assert suspects(names, most) == wanted


def test_parts_and_blocks_leave_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom_ids, "PART_ROWS", 50)
    monkeypatch.setattr(custom_ids, "ROWS_AT_ONCE", 7)
    names: list[str | None] = [str(number % 900) for number in range(1000)]
    assert suspects(names, 30) == {*range(901, 931), *range(1, 31)}


def test_names_that_come_very_often_are_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom_ids, "PART_ROWS", 50)
    monkeypatch.setattr(custom_ids, "ROWS_AT_ONCE", 10)
    sizes: list[int] = []
    repeats = custom_ids._repeats  # pyright: ignore[reportPrivateUsage]: the rows that it is given are what counts

    def noted(rows: Any) -> Any:
        sizes.append(len(rows))
        return repeats(rows)

    monkeypatch.setattr(custom_ids, "_repeats", noted)
    assert suspects(["a", "b"] * 5000, 20) == {*range(1, 23)}
    assert max(sizes) <= 2 * 50 + 10


def test_nothing_is_suspected_of_names_that_differ() -> None:
    assert suspects([f"request-{number}" for number in range(100_000)], 1000) == frozenset()
    assert suspects([], 1000) == frozenset()
