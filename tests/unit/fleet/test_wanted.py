"""How many engines each model gets."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from service.fleet.wanted import Demand, Remainder, in_time, needed, useful, wanted

HOUR = 3600.0
PATIENCE, SWITCH = 1800.0, 600.0


def decide(gpus: int, **demands: Demand) -> dict[str, int]:
    return wanted(demands, gpus, 0.0, PATIENCE, SWITCH)


def work(hours: float, due: float = 24.0) -> tuple[Remainder, ...]:
    return (Remainder(due * HOUR, hours * HOUR),)


def test_without_work_the_least_number_stays() -> None:
    assert decide(8, a=Demand(1, least=2, most=4), b=Demand(1, most=4)) == {"a": 2, "b": 0}


def test_an_engine_for_each_half_hour_of_work() -> None:
    assert useful(Demand(1, remainders=work(2.0)), PATIENCE) == 4
    assert useful(Demand(1, remainders=work(2.0), others=3), PATIENCE) == 1
    assert useful(Demand(1, remainders=(Remainder(HOUR, 0.0),)), PATIENCE) == 1
    assert decide(8, a=Demand(1, most=3, remainders=work(2.0))) == {"a": 3}
    assert decide(8, a=Demand(4, most=9, remainders=work(2.0))) == {"a": 2}


def test_a_deadline_asks_for_as_many_as_meet_it() -> None:
    """Ten hours in two, of which each new engine loses 120 s: 10 / (2 - 1/30) = 5.08."""
    assert needed(Demand(1, most=9, remainders=work(10.0, 2.0)), work(10.0, 2.0), 0.0) == 6
    running = Demand(1, most=9, remainders=work(10.0, 2.0), busy=5)
    assert needed(running, work(10.0, 2.0), 0.0) == 5
    assert needed(Demand(1, most=4), work(10.0, 2.0), 0.0) == 4


def test_of_two_deadlines_that_exclude_each_other_one_is_met() -> None:
    demands = {
        "a": Demand(1, most=4, remainders=work(3.9, 1.0)),
        "b": Demand(1, most=4, remainders=work(3.0, 1.0), busy=0),
    }
    assert {name: len(kept) for name, kept in in_time(demands, 4, 0.0).items()} == {"a": 0, "b": 1}
    assert decide(4, **demands) == {"a": 0, "b": 4}  # 3 h by four engines that need 120 s to start


def test_the_largest_is_given_up_first() -> None:
    left = (Remainder(1.0 * HOUR, 0.5 * HOUR), Remainder(1.5 * HOUR, 5.0 * HOUR), Remainder(2.0 * HOUR, 0.5 * HOUR))
    assert in_time({"a": Demand(1, most=1, remainders=left)}, 1, 0.0)["a"] == [left[0], left[2]]


def test_a_busy_engine_stays_if_the_other_deadline_can_wait() -> None:
    """One GPU; half an hour of work is left of `a`, and `b` has two hours of time for its half hour."""
    busy = Demand(1, remainders=work(0.5), busy=1)
    assert decide(1, a=busy, b=Demand(1, remainders=work(0.5, 2.0))) == {"a": 1, "b": 0}


def test_a_busy_engine_goes_if_a_deadline_would_be_missed() -> None:
    busy = Demand(1, remainders=work(5.0), busy=1)
    assert decide(1, a=busy, b=Demand(1, remainders=work(0.5, 0.6))) == {"a": 0, "b": 1}


def test_a_busy_engine_that_has_just_started_stays() -> None:
    busy = Demand(1, remainders=work(5.0), busy=1, locked=1)
    assert decide(1, a=busy, b=Demand(1, remainders=work(0.5, 0.6))) == {"a": 1, "b": 0}


def test_idle_engines_give_way_at_once() -> None:
    assert decide(2, a=Demand(1, most=2, idle=2), b=Demand(1, remainders=work(0.1))) == {"a": 1, "b": 1}
    assert decide(1, a=Demand(1, idle=1), b=Demand(1, remainders=work(0.1))) == {"a": 0, "b": 1}


def test_a_later_deadline_waits_for_an_earlier_one() -> None:
    """Many batches that are due tomorrow are no reason to miss one that is due in an hour."""
    tomorrow = tuple(Remainder(24 * HOUR, 0.1 * HOUR) for _ in range(50))
    assert decide(1, a=Demand(1, remainders=tomorrow), b=Demand(1, remainders=work(0.5, 1.0))) == {"a": 0, "b": 1}


def test_engines_of_others_count() -> None:
    assert decide(4, a=Demand(1, most=4, remainders=work(0.9, 1.0), others=1)) == {"a": 1}
    assert decide(4, a=Demand(1, most=4, remainders=work(0.4, 1.0), others=1)) == {"a": 0}


lefts = st.lists(st.builds(Remainder, st.floats(-HOUR, 48 * HOUR), st.floats(0, 20 * HOUR)), max_size=6).map(tuple)


@st.composite
def some_demand(draw: st.DrawFn) -> Demand:
    most, busy = draw(st.integers(1, 8)), draw(st.integers(0, 4))
    return Demand(
        gpus=draw(st.sampled_from([1, 2, 4, 8])),
        least=draw(st.integers(0, most)),
        most=most,
        remainders=draw(lefts),
        others=draw(st.integers(0, 2)),
        locked=draw(st.integers(0, busy)),
        busy=busy,
        idle=draw(st.integers(0, 3)),
    )


@given(st.lists(some_demand(), min_size=1, max_size=4), st.integers(0, 24))
def test_whatever_comes_no_gpu_is_given_twice_and_none_is_left_that_work_could_use(
    demands: list[Demand], gpus: int
) -> None:
    by_name = {str(number): each for number, each in enumerate(demands)}
    found = decide(gpus, **by_name)
    free = gpus - sum(found[name] * each.gpus for name, each in by_name.items())
    assert free >= 0
    for name, each in by_name.items():
        assert 0 <= found[name] <= each.most
        if found[name] < min(each.most, max(each.least, useful(each, PATIENCE))):
            assert free < each.gpus


@given(st.lists(some_demand(), min_size=1, max_size=4), st.integers(1, 24))
def test_what_can_be_in_time_is_in_time_one_after_the_other(demands: list[Demand], gpus: int) -> None:
    """The batches that are kept fit: by each deadline, no more GPU-seconds are due than there are."""
    by_name = {str(number): each for number, each in enumerate(demands)}
    kept = [(each, by_name[name].gpus) for name, found in in_time(by_name, gpus, 0.0).items() for each in found]
    for one, _ in kept:
        due = sum(each.work_s * size for each, size in kept if each.due_at <= one.due_at)
        assert due <= gpus * one.due_at + 1e-6


@given(st.lists(st.builds(Remainder, st.floats(0, 10 * HOUR), st.floats(1.0, 5 * HOUR)), max_size=7), st.integers(1, 3))
def test_no_more_could_be_in_time(left: list[Remainder], engines: int) -> None:
    """On engines of one model that all run, Moore and Hodgson's choice is as good as the best of all."""
    demand = Demand(1, most=engines, remainders=tuple(left), busy=engines)

    def fits(chosen: tuple[Remainder, ...]) -> bool:
        return all(
            sum(each.work_s for each in chosen if each.due_at <= one.due_at) <= engines * one.due_at for one in chosen
        )

    best = max(len(chosen) for size in range(len(left) + 1) for chosen in combinations(left, size) if fits(chosen))
    assert len(in_time({"a": demand}, engines, 0.0)["a"]) == best
