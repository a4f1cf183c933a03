"""The governor takes from batches at once, gives back slowly, and counts only what batches have done."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.coserve.governor import Served, governed, new_governor, note_served, note_step
from engine_ext.coserve.slo import SloClass
from engine_ext.coserve.tuning import LEAST_OF_LIMIT, SPARE

BOUNDS = SloClass(ttft_s=1.0, tpot_s=0.05).bounds
ALONE_S, LIMIT_S = 0.01, 0.05


def decoded(came_s: float, tpot_s: float, excess_s: float) -> Served:
    return Served(came_s, 0.1, 0.0, tpot_s, excess_s)


def test_a_prediction_that_is_too_short_makes_few_requests_late() -> None:
    """What a batch adds to a step takes 1.6 times as long as predicted, and from the middle on 0.8 times."""
    governor, late, shares = new_governor(), 0, list[float]()
    for k in range(20_000):
        factor = 1.6 if k < 10_000 else 0.8
        excess_s = factor * (governed(governor, LIMIT_S, ALONE_S) - ALONE_S)
        late += ALONE_S + excess_s > BOUNDS.tpot_s
        note_served(governor, BOUNDS, 0.99, decoded(float(k), ALONE_S + excess_s, excess_s), float(k))
        shares.append(float(governor.share[0]))
    assert 0 < late <= 0.01 * 10_000
    assert shares[2] <= 0.5  # as many late requests as the class allows, and then at once
    falls = sum(after < before for before, after in pairwise(shares))
    assert falls < 0.002 * 10_000  # it does not swing
    assert shares[-1] == 1.0


def test_requests_that_come_before_a_cut_are_counted_once() -> None:
    governor = new_governor()
    for _ in range(100):
        note_served(governor, BOUNDS, 0.99, decoded(1.0, 0.06, 0.05), 2.0)
    assert governor.share[0] == 0.5
    for _ in range(2):
        note_served(governor, BOUNDS, 0.99, decoded(3.0, 0.06, 0.05), 4.0)
    assert governor.share[0] == 0.25


def test_requests_that_are_late_by_themselves_say_nothing() -> None:
    governor = new_governor()
    for late in (
        Served(0.0, 2.0, 0.5, 0.01, 0.0),
        Served(0.0, 0.1, 0.0, 0.08, 0.02),
        Served(0.0, 2.0, 0.1, 0.06, 0.05),
    ):
        for _ in range(50):
            note_served(governor, BOUNDS, 0.99, late, 1.0)
    assert (governor.share[0], governor.credit[0]) == (1.0, SPARE)
    for _ in range(3):
        note_served(governor, BOUNDS, 0.99, Served(0.0, 1.1, 0.2, 0.01, 0.0), 1.0)
    assert governor.share[0] == 0.5


def test_without_bounds_nothing_is_late() -> None:
    governor, bounds = new_governor(), SloClass().bounds
    note_served(governor, bounds, 0.99, Served(0.0, 1e6, 1e6, 1e3, 1e3), 1.0)
    assert governor.share[0] == 1.0
    governor.share[0] = 0.5
    assert governed(governor, math.inf, 0.01) == math.inf
    assert governed(governor, 0.005, 0.01) == 0.005


def test_a_step_is_divided_between_online_requests_and_batches() -> None:
    governor = new_governor()
    for took_s, alone_s, whole_s in ((0.06, 0.01, 0.04), (0.5, 0.1, 0.1), (0.2, 0.02, 0.01), (0.1, 0.0, 0.0)):
        note_step(governor, took_s, alone_s, whole_s)
    assert governor.excess_s[0] == pytest.approx(0.045)


@given(st.lists(st.tuples(st.floats(0, 0.2), st.floats(0, 0.2), st.integers(0, 9)), max_size=60), st.floats(0.5, 0.999))
def test_the_share_stays_a_share(requests: list[tuple[float, float, int]], percentile: float) -> None:
    governor = new_governor()
    for at, (tpot_s, excess_s, before) in enumerate(requests):
        note_served(governor, BOUNDS, percentile, decoded(at - before, tpot_s, excess_s), float(at))
        assert LEAST_OF_LIMIT <= governor.share[0] <= 1.0
        assert 0.0 <= governor.credit[0] <= SPARE
        assert ALONE_S <= governed(governor, LIMIT_S, ALONE_S) <= LIMIT_S
