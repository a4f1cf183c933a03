"""The prefix tree against a trie and against brute force."""

from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_ext.errors import SegmentError
from engine_ext.plan.prompts import Prompts
from engine_ext.plan.tree import build_tree, common_prefix, grow_tree

# A small alphabet, so that prefixes are shared often.
prompt_lists = st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=12)
segment_lists = st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=5), min_size=1, max_size=10)
SIZES = {"a": 1, "b": 3, "c": 70}


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


@given(prompt_lists)
def test_every_prompt_has_its_leaf(prompts: list[list[int]]) -> None:
    tree = build_tree(Prompts.of(prompts))
    assert len(tree.leaves) == len(prompts)
    assert tree.first[tree.leaves].tolist() == list(range(len(prompts)))
    assert tree.end[tree.leaves].tolist() == [len(prompts[i]) for i in tree.order.tolist()]


@given(prompt_lists)
def test_common_is_what_neighbours_share(prompts: list[list[int]]) -> None:
    tree = build_tree(Prompts.of(prompts))
    arrays = [np.array(prompts[i], dtype=np.uint32) for i in tree.order.tolist()]
    assert tree.common.tolist() == [0, *(common_prefix(a, b) for a, b in pairwise(arrays))][: len(prompts)]


@given(prompt_lists)
def test_a_tree_grows_again_from_its_leaves(prompts: list[list[int]]) -> None:
    given_prompts = Prompts.of(prompts)
    tree = build_tree(given_prompts)
    again = grow_tree(tree.order, tree.common, given_prompts.lengths)
    for column in ("order", "parent", "begin", "end", "first", "last"):
        assert getattr(again, column).tolist() == getattr(tree, column).tolist()


@settings(max_examples=20)
@given(st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=1, max_size=8))
def test_no_order_shares_more_between_neighbours(prompts: list[list[int]]) -> None:
    """All orders of up to eight prompts."""
    arrays = [np.array(prompt, dtype=np.uint32) for prompt in prompts]
    common = [[common_prefix(a, b) for b in arrays] for a in arrays]

    def shared(order: tuple[int, ...]) -> int:
        return sum(common[a][b] for a, b in pairwise(order))

    order = tuple(build_tree(Prompts.of(prompts)).order.tolist())
    assert shared(order) == max(shared(each) for each in permutations(range(len(prompts))))


@given(segment_lists)
def test_segments_are_the_tokens_they_stand_for(prompts: list[list[str]]) -> None:
    spelled = [[(name, n) for name in prompt for n in range(SIZES[name])] for prompt in prompts]
    tokens = {token: number for number, token in enumerate(sorted({token for each in spelled for token in each}))}
    of_tokens = build_tree(Prompts.of([[tokens[token] for token in each] for each in spelled]))
    of_segments = Prompts.of_segments([[(name, SIZES[name]) for name in prompt] for prompt in prompts])
    assert build_tree(of_segments).distinct_tokens == of_tokens.distinct_tokens
    assert of_segments.lengths.tolist() == [len(each) for each in spelled]


def test_one_id_may_be_other_content_at_another_depth() -> None:
    prompts = Prompts.of_segments([[("a", 5), ("b", 2)], [("c", 3), ("b", 9)]])
    assert prompts.lengths.tolist() == [7, 12]


@pytest.mark.parametrize(
    ("prompts", "number", "problem"),
    [
        ([[("a", 1)], [("b", -4)]], 1, "length -4"),
        ([[("a", 1)], []], 1, "no segments"),
        ([[("a", 1), ("b", 5)], [("a", 1), ("b", 6)]], 1, "but 5 before.*prompt 0"),
    ],
)
def test_bad_segments_are_named(prompts: list[list[tuple[str | int, int]]], number: int, problem: str) -> None:
    with pytest.raises(SegmentError, match=problem) as raised:
        Prompts.of_segments(prompts)
    assert raised.value.number == number


def test_multi_turn_prompts_share_all_that_went_before() -> None:
    turns = [list(range(10 * n)) for n in range(1, 8)]
    assert build_tree(Prompts.of(turns)).distinct_tokens == 70


def test_large_token_ids_sort_as_numbers() -> None:
    assert build_tree(Prompts.of([[70000], [300], [5]])).order.tolist() == [2, 1, 0]


@pytest.mark.parametrize("starts", [[1, 3], [0, 2], [0, 5, 3], []])
def test_prompts_refuse_starts_that_do_not_fit(starts: list[int]) -> None:
    with pytest.raises(ValueError, match="starts"):
        Prompts(np.array([1, 2, 3], dtype=np.uint32), np.array(starts, dtype=np.int64))
