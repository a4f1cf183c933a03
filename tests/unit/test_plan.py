"""The first plan: depth-first order of the prefix tree, and slices."""

from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.plan.prompts import Prompts
from engine_ext.plan.tree import build_tree, common_prefix
from engine_ext.plan.window import cut_slices, plan_window

# A small alphabet, so that prefixes are shared often.
prompt_lists = st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=12)


def trie_size(prompts: list[list[int]]) -> int:
    """Distinct non-empty prefixes: the tokens to compute when each is computed once."""
    return len({tuple(prompt[:n]) for prompt in prompts for n in range(1, len(prompt) + 1)})


@given(prompt_lists)
def test_tree_computes_each_distinct_prefix_once(prompts: list[list[int]]) -> None:
    assert build_tree(Prompts.of(prompts)).distinct_tokens == trie_size(prompts)


@given(prompt_lists)
def test_order_is_a_permutation(prompts: list[list[int]]) -> None:
    tree = build_tree(Prompts.of(prompts))
    assert sorted(tree.order.tolist()) == list(range(len(prompts)))


@given(prompt_lists)
def test_nodes_above_a_prompt_spell_its_length(prompts: list[list[int]]) -> None:
    tree = build_tree(Prompts.of(prompts))
    for position, number in enumerate(tree.order.tolist()):
        above = (tree.first <= position) & (position < tree.last)
        assert int(np.sum((tree.end - tree.begin)[above])) == len(prompts[number])


@given(prompt_lists)
def test_children_begin_where_their_parent_ends(prompts: list[list[int]]) -> None:
    tree = build_tree(Prompts.of(prompts))
    for node in range(1, len(tree.parent)):
        parent = tree.parent[node]
        assert tree.begin[node] == tree.end[parent]
        assert tree.first[parent] <= tree.first[node] < tree.last[node] <= tree.last[parent]


@given(st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=1, max_size=6))
def test_no_order_shares_more_between_neighbours(prompts: list[list[int]]) -> None:
    def shared(order: tuple[int, ...]) -> int:
        arrays = [np.array(prompts[i], dtype=np.uint32) for i in order]
        return sum(common_prefix(a, b) for a, b in pairwise(arrays))

    order = tuple(build_tree(Prompts.of(prompts)).order.tolist())
    assert shared(order) == max(shared(each) for each in permutations(range(len(prompts))))


def test_identical_prompts_are_computed_once() -> None:
    plan = plan_window(Prompts.of([[1, 2, 3, 4]] * 4), slice_requests=10)
    assert plan.sharing == pytest.approx(0.75)
    assert plan.prompt_tokens == 16


def test_large_token_ids_sort_as_numbers() -> None:
    assert build_tree(Prompts.of([[70000], [300], [5]])).order.tolist() == [2, 1, 0]


@given(st.integers(0, 5000), st.integers(1, 700))
def test_slices_cover_the_window_evenly(requests: int, slice_requests: int) -> None:
    slices = cut_slices(requests, slice_requests)
    assert len(slices) == -(-requests // slice_requests)
    assert sum(each.count for each in slices) == requests
    assert all(a.first + a.count == b.first for a, b in pairwise(slices))
    if slices:
        assert slices[0].first == 0
        sizes = [each.count for each in slices]
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) <= slice_requests


def test_slices_need_a_size() -> None:
    with pytest.raises(ValueError, match="slice_requests"):
        plan_window(Prompts.of([[1]]), slice_requests=0)


@pytest.mark.parametrize("starts", [[1, 3], [0, 2], [0, 5, 3], []])
def test_prompts_refuse_starts_that_do_not_fit(starts: list[int]) -> None:
    with pytest.raises(ValueError, match="starts"):
        Prompts(np.array([1, 2, 3], dtype=np.uint32), np.array(starts, dtype=np.int64))
