"""Room in a window is shared between projects by weight, and none is left while any wants it."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from service.jobs.fair_window import Span, fill, fitting, shared_room

Wanted = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 1000), min_size=1)


@given(wanted=Wanted, weights=st.lists(st.floats(0.1, 10), min_size=6, max_size=6), room=st.integers(1, 3000))
def test_room_is_shared_by_weight(wanted: dict[str, int], weights: list[float], room: int) -> None:
    weight = dict(zip("abcdef", weights, strict=True))
    shares = shared_room(wanted, weight, room)
    assert sum(shares.values()) == min(room, sum(wanted.values()))
    for one in wanted:
        assert 0 <= shares[one] <= wanted[one]
        for other in wanted:
            if shares[one] < wanted[one]:  # who wants more has, by its weight, no less than anyone, but for rounding
                assert (shares[one] + len(wanted)) / weight[one] >= (shares[other] - 1) / weight[other] - 1e-9


def span(batch: str, project: str, count: int) -> Span:
    return Span(batch, project, 1.0, "index", 0, count, 0)


def test_a_project_that_came_first_with_much_leaves_room_for_another() -> None:
    chosen = fill([span("a1", "a", 900), span("a2", "a", 900), span("b1", "b", 300)], 1000)
    assert [(each.batch_id, each.count) for each in chosen] == [("a1", 700), ("b1", 300)]


def test_alone_a_project_has_the_whole_window() -> None:
    chosen = fill([span("a1", "a", 900), span("a2", "a", 900)], 1000)
    assert [(each.batch_id, each.count) for each in chosen] == [("a1", 900), ("a2", 100)]


def test_tokens_are_shared_as_requests_are() -> None:
    """A project with long prompts and an early deadline does not take the whole window."""
    spans = [span("a1", "a", 10), span("b1", "b", 10), span("a2", "a", 10)]
    tokens = [np.full(10, 100), np.full(10, 10), np.full(10, 100)]
    assert fitting(spans, tokens, 1000) == [9, 10, 0]
    assert fitting(spans, tokens, 100) == [1, 5, 0]


def test_what_is_longer_than_a_window_is_planned_alone() -> None:
    assert fitting([span("a1", "a", 3)], [np.full(3, 500)], 100) == [1]
