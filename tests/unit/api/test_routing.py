from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from service.api.routing import FEW, Target, ordered

PREFIXES = [f"a conversation that begins like {n}".encode() for n in range(200)]


def workers(count: int) -> list[Target]:
    return [Target(f"worker-{n}", f"http://10.0.0.{n}:1") for n in range(count)]


def test_equal_prefixes_go_to_one_worker_and_different_ones_to_all() -> None:
    first = [ordered(workers(4), prefix, Counter(), set())[0] for prefix in PREFIXES]
    assert first == [ordered(workers(4)[::-1], prefix, Counter(), set())[0] for prefix in PREFIXES]
    assert all(25 <= count <= 75 for count in Counter(first).values())


def test_only_the_prefixes_of_a_worker_that_leaves_move() -> None:
    before = [ordered(workers(4), prefix, Counter(), set())[0] for prefix in PREFIXES]
    after = [ordered(workers(3), prefix, Counter(), set())[0] for prefix in PREFIXES]
    assert all(then == now for then, now in zip(before, after, strict=True) if then.name != "worker-3")


def test_a_worker_with_more_than_its_share_comes_after_the_others() -> None:
    [preferred, second, *_] = ordered(workers(3), b"x", Counter(), set())
    load = Counter({each.name: 8 for each in workers(3)})
    load[preferred.name] = 9
    assert ordered(workers(3), b"x", load, set())[0] == preferred, "8, 8 and 9 are even enough"
    load[preferred.name] = 20
    assert ordered(workers(3), b"x", load, set())[0] == second
    assert ordered(workers(3), b"x", Counter({preferred.name: FEW - 1}), set())[0] == preferred


def test_a_worker_that_did_not_answer_is_last() -> None:
    [preferred, *others] = ordered(workers(3), b"x", Counter(), set())
    assert ordered(workers(3), b"x", Counter(), {preferred}) == [*others, preferred]


@given(
    st.integers(0, 5),
    st.binary(max_size=40),
    st.dictionaries(st.sampled_from([f"worker-{n}" for n in range(6)]), st.integers(0, 50)),
    st.sets(st.sampled_from(workers(6))),
)
def test_every_worker_is_in_the_order_once(
    count: int, prefix: bytes, load: dict[str, int], avoided: set[Target]
) -> None:
    found = ordered(workers(count), prefix, Counter(load), avoided)
    assert sorted(each.name for each in found) == [each.name for each in workers(count)]
