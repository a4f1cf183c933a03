"""Lengths of earlier answers: what profiles hold, what they lend to a new batch, and when they are not believed."""

import numpy as np
import pytest

from engine_ext.arrays import Bools, Column
from engine_ext.errors import InputError
from engine_ext.plan.buckets import BUCKETS, EDGES, LONGEST
from engine_ext.plan.groups import Groups
from engine_ext.plan.lengths import borrow, look_ahead, see
from engine_ext.plan.memory import NO_PROFILE, Profile, Recall, learn, recall
from engine_ext.plan.tuning import FEWEST_IN_PROFILE, MOST_LENT

Answers = tuple[Column, Column, Bools]
NOBODY: Answers = (np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.bool_))


def one_group(requests: int) -> Groups:
    return Groups.unlike(np.zeros(requests, dtype=np.int64), np.array([-1]))


def mean(groups: Groups, found: Recall | None, answers: Answers = NOBODY) -> list[float]:
    seen = see(groups, *answers, borrow(found, groups, *answers))
    return look_ahead(seen, groups, np.full(len(groups), LONGEST)).rest[:, 0].tolist()


@pytest.mark.parametrize("tokens", [[1], [16], [17], [1, 2, 3, 500, 40_000], [LONGEST, LONGEST + 5]])
def test_a_profile_knows_how_many_answers_ended_where(tokens: list[int]) -> None:
    found = Profile.of(np.array(tokens))
    assert found.answers == len(tokens)
    for each in tokens:
        [bucket] = [at for at in range(BUCKETS) if EDGES[at] < min(each, LONGEST) <= EDGES[at + 1]]
        assert found.ended[bucket] > 0
    assert float((found.ended @ EDGES[:-1]) + found.reached.sum()) == sum(min(each, LONGEST) for each in tokens)


def test_text_brings_a_profile_back() -> None:
    found = Profile.of(np.random.default_rng(0).integers(1, 3000, 500))
    again = Profile.parse(found.text)
    assert again.text == found.text
    np.testing.assert_allclose(again.ended, found.ended)
    np.testing.assert_allclose(again.reached, found.reached, rtol=1e-4)
    assert len(found.text) < 2000


@pytest.mark.parametrize(
    "text",
    ["", "nonsense", "[]", "{}", "[[1]]", "[[99999,1,1]]", "[[0,-1,1]]", '[["a",1,1]]', "[[0,NaN,1]]", "[[0,1e999,1]]"],
)
def test_what_is_no_profile_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="not a profile"):
        Profile.parse(text)


def test_later_answers_replace_earlier_ones() -> None:
    short, long = Profile.of(np.full(900, 10)), Profile.of(np.full(300, 1000))
    both = short.plus(long, 1000)
    assert both.answers == 1000
    assert both.ended[0] == 700
    assert short.plus(Profile.of(np.full(2000, 1000)), 1000).ended[0] == 0


def test_a_batch_teaches_beginnings_that_several_requests_share_and_kinds_for_the_others() -> None:
    keys = np.array([[1, 9]] * FEWEST_IN_PROFILE + [[2, 9]] * (FEWEST_IN_PROFILE - 1) + [[3, 9], [0, 0]])
    tokens = np.array([100] * FEWEST_IN_PROFILE + [20] * (FEWEST_IN_PROFILE - 1) + [30, 5000])
    lessons = learn(keys, tokens, 10)
    assert {key: profile.answers for key, profile in lessons.items()} == {1: FEWEST_IN_PROFILE, 9: FEWEST_IN_PROFILE}
    assert learn(np.zeros((3, 2), dtype=np.int64), np.full(3, 10), 10) == {}


def test_a_batch_of_many_kinds_teaches_those_of_the_most_answers() -> None:
    kinds = np.repeat(np.arange(1, 101), np.arange(100) % FEWEST_IN_PROFILE)  # up to seven requests of each
    keys = np.stack([np.arange(1000, 1000 + len(kinds)), kinds], axis=1)
    lessons = learn(keys, kinds, 12)
    wanted = {
        kind: Profile.of(np.full(FEWEST_IN_PROFILE - 1, kind))
        for kind in range(FEWEST_IN_PROFILE, 101, FEWEST_IN_PROFILE)
    }
    assert {key: profile.text for key, profile in lessons.items()} == {
        key: profile.text for key, profile in wanted.items()
    }


def test_a_request_is_known_by_its_beginning_or_else_by_its_kind() -> None:
    known = {5: Profile.of(np.full(10, 10)), 9: Profile.of(np.full(10, 900))}
    found = recall(np.array([[5, 9], [6, 9], [6, 8], [0, 0]]), known)
    assert found is not None
    assert [float(found.profiles.ended[row, 0]) if row >= 0 else None for row in found.rows] == [10, 0, None, None]
    assert recall(np.array([[6, 8]]), known) is None
    assert recall(np.array([[5, 9]]), {}) is None


def test_profiles_are_shared_by_the_requests_that_came_with_them() -> None:
    one, two = Profile.of(np.full(10, 10)), Profile.of(np.full(10, 900))
    found = Recall.of([one, None, two, one])
    assert found is not None
    assert found.rows.tolist() == [0, NO_PROFILE, 1, 0]
    assert Recall.of([None, None]) is None


def test_what_is_remembered_is_expected() -> None:
    groups = one_group(100)
    assert mean(groups, None) == [pytest.approx(256, rel=0.05)]
    found = Recall.of([Profile.of(np.full(4000, 40))] * 100)
    assert mean(groups, found) == [pytest.approx(40, rel=0.05)]


def test_a_profile_counts_for_a_bounded_number_of_answers() -> None:
    groups, found = one_group(100), Recall.of([Profile.of(np.full(4000, 40))] * 100)
    seen = see(groups, *NOBODY, borrow(found, groups, *NOBODY))
    assert seen.entered[0, 0] == pytest.approx(MOST_LENT)
    few = see(groups, *NOBODY, borrow(Recall.of([Profile.of(np.full(9, 40))] * 100), groups, *NOBODY))
    assert few.ended.sum() == pytest.approx(9)


def test_groups_share_a_profile_by_their_requests_and_their_parent_has_the_mean_of_all() -> None:
    groups = Groups.unlike(np.array([1] * 30 + [2] * 10 + [3] * 60), np.array([-1, 0, 0, 0]))
    short, long = Profile.of(np.full(500, 40)), Profile.of(np.full(500, 4000))
    found = Recall.of([short] * 40 + [long] * 60)
    whole, first, second, third = mean(groups, found)
    assert first == pytest.approx(40, rel=0.05)
    assert second == pytest.approx(40, rel=0.05)
    assert third == pytest.approx(4000, rel=0.1)
    assert whole == pytest.approx(0.4 * 40 + 0.6 * 4000, rel=0.1)


@pytest.mark.parametrize(("remembered", "true"), [(4000, 100), (100, 4000)])
def test_answers_that_contradict_a_profile_are_believed_instead(remembered: int, true: int) -> None:
    groups, found = one_group(1000), Recall.of([Profile.of(np.full(4000, remembered))] * 1000)
    answers = np.arange(30), np.full(30, true), np.ones(30, np.bool_)
    assert mean(groups, found, answers) == [pytest.approx(true, rel=0.15)]


def test_requests_that_run_beyond_a_profile_contradict_it_too() -> None:
    groups, found = one_group(1000), Recall.of([Profile.of(np.full(4000, 100))] * 1000)
    running = np.arange(30), np.full(30, 2000), np.zeros(30, np.bool_)
    [expected] = mean(groups, found, running)
    assert expected > 2000
