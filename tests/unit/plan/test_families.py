"""Families: prompts that share most of their tokens with a few others."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.plan.families import find_families
from engine_ext.plan.prompts import Prompts
from engine_ext.plan.tree import build_tree
from engine_ext.plan.tuning import LARGEST_FAMILY


def families_of(prompts: list[list[int]]) -> list[list[int]]:
    found = find_families(build_tree(Prompts.of(prompts)))
    return sorted(np.flatnonzero(found == each).tolist() for each in np.unique(found))


def test_the_questions_about_a_document_are_a_family() -> None:
    questions = [[7] * 50 + [document] * 40 + [100 + question] * 10 for document in range(9) for question in range(3)]
    assert families_of(questions) == [[3 * document, 3 * document + 1, 3 * document + 2] for document in range(9)]


def test_what_a_few_prompts_begin_with_alike_makes_no_family_if_it_is_short() -> None:
    alike = [[7] * 50 + [begin] * 10 + [100 + own] * 40 for begin in range(9) for own in range(begin, 90, 9)]
    assert all(len(family) == 1 for family in families_of(alike))


def test_many_who_share_a_prefix_are_no_family() -> None:
    prompts = [[1] * 90 + [100 + own] * 10 for own in range(LARGEST_FAMILY + 1)]
    assert all(len(family) == 1 for family in families_of(prompts))
    assert families_of(prompts[:-1]) == [list(range(LARGEST_FAMILY))]


def test_equal_prompts_are_a_family_and_one_or_none_is_fine() -> None:
    assert families_of([[1, 2], [1, 2]]) == [[0, 1]]
    assert families_of([[1, 2]]) == [[0]]
    assert families_of([]) == []


def test_a_document_is_found_below_what_others_begin_with_too() -> None:
    """Four questions about one document, and four other prompts, all of which begin alike."""
    questions = [[1] * 5 + [2] * 80 + [10 + k] * 5 for k in range(4)]
    others = [[1] * 5 + [20 + k] * 85 for k in range(4)]
    assert families_of([*questions, *others]) == [[0, 1, 2, 3], [4], [5], [6], [7]]
    assert families_of([[3] * 1000 + [4], [3] * 1000 + [5], *others]) == [[0, 1], [2], [3], [4], [5]]


@given(st.lists(st.lists(st.integers(1, 2), max_size=6), max_size=40))
def test_families_are_those_of_brute_force(prompts: list[list[int]]) -> None:
    def those_with(prefix: list[int]) -> list[int]:
        return [k for k, prompt in enumerate(prompts) if prompt[: len(prefix)] == prefix]

    def shared(members: list[int]) -> int:
        """How many tokens all of them have in common."""
        columns = zip(*(prompts[k] for k in members), strict=False)
        return next(
            (at for at, column in enumerate(columns) if len(set(column)) > 1), min(len(prompts[k]) for k in members)
        )

    def is_family(members: list[int], common: int) -> bool:
        own = sum(len(prompts[k]) - common for k in members)
        return 1 < len(members) <= LARGEST_FAMILY and 2 * (shared(members) - common) * len(members) >= own

    found = list[list[int]]()
    for k, prompt in enumerate(prompts):
        chain = [those_with(prompt[:length]) for length in range(len(prompt) + 1)]
        common = max((shared(each) for each in chain if len(each) > LARGEST_FAMILY), default=0)
        best = next((each for each in chain if is_family(each, common)), [k])
        found.append(best)
    assert families_of(prompts) == sorted({tuple(each): each for each in found}.values())
