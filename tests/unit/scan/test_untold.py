"""What a step admitted in vain returns to its queue in the order in which it stood there."""

from hypothesis import given
from hypothesis import strategies as some

from engine_ext.scan.events import FINISHED, PUT_BACK
from engine_ext.scan.untold import Untold


def fronts(untold: Untold) -> list[int]:
    """The queue's first requests after each event has put its request in front of all others."""
    queue: list[int] = []
    for kind, number, _ in untold.events:
        if kind == PUT_BACK:
            queue.insert(0, number)
    return queue


def test_what_the_engine_refused_returns_among_the_twins_that_were_held_back() -> None:
    untold = Untold()
    untold.hold([7, 5, 3, 9, 8, 1], held=[5, 3, 8])
    untold.add((FINISHED, 4, 20))
    for refused in (9, 7):
        untold.add((PUT_BACK, refused, 0))
    assert fronts(untold) == [7, 5, 3, 9, 8]


def test_what_was_admitted_in_an_earlier_step_goes_before_all_others() -> None:
    untold = Untold()
    untold.hold([7, 5], held=[5])
    untold.clear()
    untold.hold([6, 2], held=[2])
    untold.add((PUT_BACK, 7, 0))
    untold.add((PUT_BACK, 6, 0))
    assert fronts(untold) == [7, 6, 2]


@given(some.data(), some.lists(some.integers(0, 50), unique=True, max_size=12))
def test_a_queue_is_in_its_old_order_whatever_is_held_back_and_refused(data: some.DataObject, step: list[int]) -> None:
    kinds = {number: data.draw(some.sampled_from(["admitted", "held", "refused"])) for number in step}
    untold = Untold()
    untold.hold(step, [number for number in step if kinds[number] == "held"])
    for number in reversed([number for number in step if kinds[number] == "refused"]):
        for _ in range(data.draw(some.integers(0, 2))):
            untold.add((FINISHED, 99, 1))
        untold.add((PUT_BACK, number, 0))
    assert fronts(untold) == [number for number in step if kinds[number] != "admitted"]
