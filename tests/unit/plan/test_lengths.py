"""Length estimates: finished, running and absent answers, groups, samples."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.arrays import Column
from engine_ext.plan.families import find_families
from engine_ext.plan.groups import Groups, group_requests
from engine_ext.plan.lengths import (
    BUCKETS,
    EDGES,
    LONGEST,
    Estimates,
    Outlook,
    Seen,
    bucket_of,
    estimate,
    group_caps,
    look_ahead,
    record,
    see,
)
from engine_ext.plan.prompts import Prompts
from engine_ext.plan.sample import ask_sample, choose_sample
from engine_ext.plan.tree import build_tree
from engine_ext.plan.tuning import ALIKE, MOST_SMALL_TASKS, PRIOR_MEAN, SAMPLE_FEW, SAMPLE_MOST, SMALLEST_TASK, UNLIKE

ONE = np.array([-1])


def alone(count: int) -> Groups:
    return Groups.unlike(np.zeros(count, dtype=np.int64), ONE)


def outlook_of(tokens: Column, finished: "np.ndarray[tuple[int], np.dtype[np.bool_]] | None" = None) -> Outlook:
    groups = alone(len(tokens))
    done = np.ones(len(tokens), dtype=np.bool_) if finished is None else finished
    return look_ahead(see(groups, np.arange(len(tokens)), tokens, done), groups, np.array([LONGEST]))


def estimates_of(tokens: Column) -> Estimates:
    count = len(tokens)
    return estimate(alone(count), outlook_of(tokens), np.full(count, LONGEST), np.full(count, -1))


@given(st.integers(0, 2 * LONGEST))
def test_buckets_hold_their_lengths(tokens: int) -> None:
    bucket = bucket_of(tokens)
    assert EDGES[bucket] <= tokens
    assert tokens < EDGES[bucket + 1] or bucket == BUCKETS - 1


@pytest.mark.parametrize("length", [3, 40, 200, 5000])
def test_equal_answers_are_expected_again(length: int) -> None:
    found = estimates_of(np.full(1000, length))
    assert found.mean[0] == pytest.approx(length, rel=0.03)
    assert length <= found.high[0] <= 1.25 * length + 16


@pytest.mark.parametrize("seed", range(3))
def test_mean_spread_and_quantile_of_long_answers(seed: int) -> None:
    answers = np.random.default_rng(seed).lognormal(7, 0.6, 3000).astype(np.int64)
    found = estimates_of(answers)
    assert found.mean[0] == pytest.approx(answers.mean(), rel=0.05)
    assert found.squares[0] == pytest.approx((answers.astype(float) ** 2).mean(), rel=0.15)
    assert found.high[0] == pytest.approx(np.quantile(answers, 0.9), rel=0.15)


def test_running_answers_are_lower_bounds() -> None:
    """Long answers still run at 1000 tokens: ignoring them, or taking them for endings, makes the mean too small."""
    generator = np.random.default_rng(0)
    answers = generator.exponential(1500, 4000).astype(np.int64) + 1
    running = answers > 1000
    so_far = np.minimum(answers, 1000)
    learned = outlook_of(so_far, ~running)
    ended = answers[answers <= 1000]
    assert learned.rest[0, 0] > 1.5 * ended.mean()
    chance = float(np.prod(1 - learned.hazard[0, : bucket_of(990)]))
    assert chance == pytest.approx((answers > 990).mean(), abs=0.04)


def test_counting_in_parts_is_counting_at_once() -> None:

    whole, parts = Seen.nothing(1), Seen.nothing(1)
    record(whole, ONE, 0, 0, 777, True, 1.0)
    for before, now, done in ((0, 128, False), (128, 144, False), (144, 600, False), (600, 777, True)):
        record(parts, ONE, 0, before, now, done, 1.0)
    record(whole, ONE, 0, 0, 256, True, 1.0)
    record(parts, ONE, 0, 0, 256, False, 1.0)
    record(parts, ONE, 0, 256, 256, True, 1.0)
    for a, b in ((whole.entered, parts.entered), (whole.ended, parts.ended), (whole.reached, parts.reached)):
        np.testing.assert_allclose(a, b)


def test_nothing_known_is_the_prior_within_the_cap() -> None:
    groups = alone(2)
    nothing = see(groups, np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.bool_))
    wide = look_ahead(nothing, groups, np.array([LONGEST]))
    assert wide.rest[0, 0] == pytest.approx(PRIOR_MEAN, rel=0.1)
    caps = np.array([40, 5])
    found = estimate(groups, look_ahead(nothing, groups, group_caps(groups, caps)), caps, np.array([-1, -1]))
    assert found.mean[0] < 40
    assert found.mean[1] <= 5
    assert np.all(found.high <= caps)


def test_known_lengths_are_used_as_known() -> None:
    groups = alone(2)
    outlook = outlook_of(np.array([10, 20]))
    found = estimate(groups, outlook, np.array([500, 500]), np.array([500, -1]))
    assert (found.mean[0], found.squares[0], found.high[0]) == (500, 250_000, 500)


def test_a_group_without_answers_borrows_from_its_siblings() -> None:
    groups = Groups.unlike(np.repeat([1, 2], 50), np.array([-1, 0, 0]))
    outlook = look_ahead(
        see(groups, np.arange(50), np.full(50, 700), np.ones(50, np.bool_)), groups, np.full(3, LONGEST)
    )
    assert outlook.rest[1, 0] == pytest.approx(700, rel=0.05)
    assert outlook.rest[2, 0] == pytest.approx(700, rel=0.15)


def test_a_group_that_was_asked_more_often_lends_no_more_than_its_requests() -> None:
    """A tenth of the requests, half of the sample: those nobody was asked of expect a tenth of such answers."""
    groups = Groups.unlike(np.repeat([1, 2, 3], [900, 100, 500]), np.array([-1, 0, 0, 0]))
    requests, tokens = np.arange(880, 920), np.repeat([10, 8000], 20)
    outlook = look_ahead(see(groups, requests, tokens, np.ones(40, np.bool_)), groups, np.full(4, LONGEST))
    assert outlook.rest[0, 0] == pytest.approx(0.9 * 10 + 0.1 * 8000, rel=0.1)
    assert outlook.rest[3, 0] == pytest.approx(0.9 * 10 + 0.1 * 8000, rel=0.15)
    assert outlook.rest[2, 0] == pytest.approx(8000, rel=0.1)


def test_its_own_answers_outweigh_its_siblings() -> None:
    groups = Groups.unlike(np.repeat([1, 2], 500), np.array([-1, 0, 0]))
    requests = np.concatenate([np.arange(500), [500, 501, 502, 503]])
    tokens = np.concatenate([np.full(500, 3), np.full(4, 8000)])
    outlook = look_ahead(see(groups, requests, tokens, np.ones(504, np.bool_)), groups, np.full(3, LONGEST))
    assert outlook.rest[1, 0] == pytest.approx(3, rel=0.5)
    assert outlook.rest[2, 0] == pytest.approx(8000, rel=0.3)


def test_long_runners_among_short_answers_are_unlike_them_before_any_has_ended() -> None:
    """Four of a leaning group still run at 800 tokens; two hundred of its parent's have ended by the twentieth."""
    groups = Groups(np.repeat([0, 1], [200, 40]), np.array([-1, 0]), np.array([UNLIKE, ALIKE]))
    told = np.concatenate([np.arange(200), np.arange(200, 204)])
    so_far = np.concatenate([np.full(200, 20), np.full(4, 800)])
    seen = see(groups, told, so_far, np.arange(204) < 200)
    outlook = look_ahead(seen, groups, np.full(2, LONGEST))
    assert outlook.rest[1, 0] > 800
    assert outlook.rest[0, 0] < 300


def prompts_in_groups(count: int) -> Prompts:
    """Three prefixes with `count` prompts each, and as many prompts that share nothing."""
    shared = [[group] * 20 + [1000 + group * count + n] for group in range(3) for n in range(count)]
    return Prompts.of([*shared, *([10_000 + n] for n in range(count))])


def test_groups_are_large_nodes_and_what_is_left() -> None:
    groups = group_requests(build_tree(prompts_in_groups(40)))
    assert len(np.unique(groups.of)) == 4
    assert np.unique(groups.of, return_counts=True)[1].tolist() == [40] * 4
    assert np.all(groups.parent < np.arange(len(groups)))


def test_small_groups_stay_with_their_parent() -> None:
    assert len(group_requests(build_tree(prompts_in_groups(5)))) == 1


def test_a_small_task_is_a_group_beside_one_of_many_cases() -> None:
    """Where there are too many large nodes, the tasks at the top go before the cases below them."""
    cases = [[1, 10 + case, 5000 + n] for case in range(700) for n in range(40)]
    groups = group_requests(build_tree(Prompts.of([*cases, *([2, 100_000 + n] for n in range(36))])))
    small = set(groups.of[len(cases) :].tolist())
    assert len(small) == 1
    assert not small & set(groups.of[: len(cases)].tolist())


@pytest.mark.parametrize(("tasks", "groups"), [(2, 4), (MOST_SMALL_TASKS, MOST_SMALL_TASKS + 2), (40, 2)])
def test_a_few_small_tasks_are_groups_and_many_are_cases_of_one(tasks: int, groups: int) -> None:
    """Eleven long answers that no group shows begin last; hundreds of groups would use up the sample."""
    small = [[1, 10 + task, 5000 + n] for task in range(tasks) for n in range(SMALLEST_TASK)]
    found = group_requests(build_tree(Prompts.of([*small, *([1, 1_000_000 + n] for n in range(20))])))  # and two of all
    assert len(found) == groups


def test_long_prompts_are_a_group_that_leans_on_the_short_ones() -> None:
    lengths = [60] * 50 + [900] * 50
    groups = group_requests(build_tree(Prompts.of_segments([[("a", 5), (n, size)] for n, size in enumerate(lengths)])))
    short, long = int(groups.of[0]), int(groups.of[60])
    assert short != long
    assert groups.parent[short] == groups.parent[long]
    assert groups.leaning[short] == ALIKE


def test_kinds_divide_a_group() -> None:
    prompts = Prompts.of([[n] for n in range(200)])
    kinds = np.array([256] * 100 + [4096] * 80 + list(range(20)))
    groups = group_requests(build_tree(prompts), kinds)
    assert len({int(groups.of[0]), int(groups.of[100]), int(groups.of[199])}) == 3
    assert groups.of[180] == groups.of[199]


def test_there_are_never_too_many_groups() -> None:
    prompts = Prompts.of([[group] * 5 + [5000 + n] for group in range(2000) for n in range(33)])
    kinds = np.arange(len(prompts)) % 2
    assert len(group_requests(build_tree(prompts), kinds)) <= 1024


@given(st.integers(1, 120), st.floats(0.01, 1), st.integers(0, 3))
def test_samples_are_of_the_size_asked_with_every_group(count: int, share: float, seed: int) -> None:
    prompts = prompts_in_groups(count)
    groups = group_requests(build_tree(prompts))
    nothing = see(groups, np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.bool_))
    outlook = look_ahead(nothing, groups, group_caps(groups, np.full(len(prompts), 4096)))
    known = np.where(np.arange(len(prompts)) % 5 == 0, 7, -1)
    found = choose_sample(
        groups, outlook, prompts.lengths.astype(float), known, np.random.default_rng(seed), np.arange(len(known)), share
    )
    open_requests = np.flatnonzero(known < 0)
    assert len(np.unique(found)) == len(found)
    assert np.all(known[found] < 0)
    wanted = int(np.ceil(share * len(open_requests)))
    asked = set(groups.of[known >= 0].tolist())
    new = set(groups.of[open_requests].tolist()) - asked
    assert len(set(groups.of[found].tolist()) & new) >= min(len(new), wanted // 2)
    most = np.maximum(
        SAMPLE_FEW, np.ceil(SAMPLE_MOST * share * np.bincount(groups.of[open_requests], minlength=len(groups)))
    )
    assert np.all(np.bincount(groups.of[found], minlength=len(groups)) <= most)
    assert len(found) <= wanted


@pytest.mark.parametrize("share", [0.01, 0.3, 1.0])
def test_both_halves_of_a_sample_are_the_share_asked_for(share: float) -> None:
    prompts = prompts_in_groups(100)
    groups = group_requests(build_tree(prompts))
    truth = np.where(np.arange(len(prompts)) % 4 == 0, -1, 7)
    caps = group_caps(groups, np.full(len(prompts), 4096))
    family, generator = np.arange(len(truth)), np.random.default_rng(1)
    chosen, seen = ask_sample(groups, caps, prompts.lengths.astype(float), truth, generator, family, share)
    assert len(np.unique(chosen)) == int(np.ceil(share * 300))
    assert np.all(truth[chosen] == 7)
    assert seen.ended[0].sum() == pytest.approx(len(chosen))


def test_samples_go_where_the_memory_work_is_uncertain() -> None:
    groups = Groups.unlike(np.repeat([1, 2], 5000), np.array([-1, 0, 0]))
    seen = see(
        groups,
        np.array([0, 1, 2, 3, 5000, 5001, 5002, 5003]),
        np.array([2, 2, 2, 2, 50, 900, 4000, 12_000]),
        np.ones(8, np.bool_),
    )
    outlook = look_ahead(seen, groups, np.full(3, LONGEST))
    unknown, generator = np.full(10_000, -1), np.random.default_rng(0)
    found = choose_sample(groups, outlook, np.full(10_000, 500.0), unknown, generator, np.arange(10_000))
    counts = np.bincount(groups.of[found], minlength=3)
    assert counts.sum() == 100
    assert counts[2] > 5 * counts[1] > 0


def test_those_that_ran_count_as_sampled_and_what_is_new_is_asked_first() -> None:
    groups = Groups.unlike(np.repeat([1, 2, 3], [600, 300, 100]), np.array([-1, 0, 0, 0]))
    known = np.full(1000, -1)
    known[:30] = 7
    nothing = look_ahead(Seen.nothing(4), groups, np.full(4, LONGEST))
    ran = np.array([0, 30, 0, 0])
    generator = np.random.default_rng(0)
    found = choose_sample(groups, nothing, np.full(1000, 500.0), known, generator, np.arange(1000), 0.05, ran)
    assert len(found) == 50 - 30
    assert groups.of[found[:2]].tolist() == [2, 3]
    ran = np.array([0, 60, 0, 0])
    assert len(choose_sample(groups, nothing, np.full(1000, 500.0), known, generator, np.arange(1000), 0.05, ran)) == 0


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5])
def test_the_share_to_sample_is_a_share(share: float) -> None:
    outlook = outlook_of(np.array([1]))
    with pytest.raises(ValueError, match="share"):
        choose_sample(alone(1), outlook, np.ones(1), np.array([-1]), np.random.default_rng(0), np.zeros(1, int), share)


def test_a_sample_computes_few_documents_for_as_many_answers() -> None:
    """Of two tasks, which are two groups, with six questions about each document."""
    prompts = Prompts.of([[7 + n % 2] * 20 + [100 + n // 12] * 80 + [5000 + n] * 5 for n in range(3000)])
    tree = build_tree(prompts)
    groups, unknown = group_requests(tree), np.full(3000, -1)
    outlook = look_ahead(Seen.nothing(len(groups)), groups, group_caps(groups, np.full(3000, LONGEST)))
    lengths, generator = prompts.lengths.astype(float), np.random.default_rng(0)
    found = choose_sample(groups, outlook, lengths, unknown, generator, find_families(tree), 0.02)
    assert len(found) == 60
    documents = found // 12 * 2 + found % 2
    assert len(np.unique(documents)) <= 12
    assert np.count_nonzero(np.diff(documents)) == len(np.unique(documents)) - 1  # each document's run together


def test_large_families_are_not_chosen_more_often() -> None:
    """Half of the requests of a group are alone, and half are in families of sixteen."""
    groups = Groups.unlike(np.zeros(3200, dtype=np.int64), np.array([-1]))
    outlook = look_ahead(Seen.nothing(1), groups, np.full(1, LONGEST))
    family, unknown = np.concatenate([np.arange(1600), 1600 + np.arange(1600) // 16]), np.full(3200, -1)
    lengths = np.full(3200, 100.0)
    shares = [
        np.mean(choose_sample(groups, outlook, lengths, unknown, np.random.default_rng(k), family, 0.05) >= 1600)
        for k in range(100)
    ]
    assert 0.4 < np.mean(shares) < 0.6
