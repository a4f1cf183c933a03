"""How the workers of a model divide what is left."""

import math

import pytest

from service.queue.crew import LEAST, Crew, Hand


def hand(requests: int, pace: float = 0.0, full_at: int = 100) -> Hand:
    return Hand(requests, pace, full_at)


def test_equal_workers_have_equal_shares_and_the_slower_one_less() -> None:
    assert Crew((hand(0), hand(0)), 300).share(hand(0)) == 100
    assert Crew((hand(40, pace=3.0),), 60).share(hand(20, pace=1.0)) == 30
    assert Crew((hand(40, pace=1.0),), 60).share(hand(20, pace=3.0)) == 90
    assert Crew((), 60).share(hand(20)) == 80, "a worker alone has all of it"


def test_a_worker_whose_pace_is_not_known_counts_as_the_others_do() -> None:
    assert Crew((hand(0, pace=2.0), hand(0, pace=6.0)), 120).share(hand(0)) == pytest.approx(40)
    assert Crew((hand(0),), 120).share(hand(0, pace=5.0)) == 60


def test_shares_have_no_bound_while_more_waits_than_is_announced() -> None:
    assert Crew((hand(10),), math.inf).share(hand(5)) == math.inf


def test_only_what_another_engine_could_begin_is_handed_over() -> None:
    assert Crew((hand(0),), 0).give(hand(100)) == (50, 1)
    assert Crew((hand(0), hand(0)), 0).give(hand(90)) == (60, 2)
    assert Crew((hand(0),), 1).give(hand(100)) == (0, 0), "a slice waits that it can take"
    assert Crew((hand(30, full_at=20),), 0).give(hand(100)) == (0, 0), "its engine is full"
    assert Crew((hand(10),), 0).give(hand(10 + LEAST)) == (0, 0), "that is not worth it"
    assert Crew((hand(0),), 0).give(hand(2 * LEAST)) == (LEAST, 1)


def test_a_worker_alone_hands_nothing_over() -> None:
    assert Crew((), 0).give(hand(1000)) == (0, 0)


def test_what_is_written_is_read() -> None:
    told = Hand(12, 1.5, 256, (3, 4, 9))
    assert Hand.parse(str(told).encode()) == told
    assert Hand.parse(b"[1]") is None, "another version's"
    assert Hand.parse(b"{}") is None
