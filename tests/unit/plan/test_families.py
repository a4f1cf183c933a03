"""Families: prompts that share most of their tokens with a few others."""

import numpy as np

from engine_ext.plan.families import LARGEST, families
from engine_ext.plan.groups import group_requests
from engine_ext.plan.lengths import LONGEST, Seen, group_caps, look_ahead
from engine_ext.plan.prompts import Prompts
from engine_ext.plan.sample import choose_sample
from engine_ext.plan.tree import build_tree


def of(prompts: list[list[int]]) -> list[list[int]]:
    found = families(build_tree(Prompts.of(prompts)))
    return sorted(np.flatnonzero(found == each).tolist() for each in np.unique(found))


def test_the_questions_about_a_document_are_a_family() -> None:
    questions = [[7] * 50 + [document] * 40 + [100 + question] * 10 for document in range(9) for question in range(3)]
    assert of(questions) == [[3 * document, 3 * document + 1, 3 * document + 2] for document in range(9)]


def test_what_a_few_prompts_begin_with_alike_makes_no_family_if_it_is_short() -> None:
    alike = [[7] * 50 + [begin] * 10 + [100 + own] * 40 for begin in range(9) for own in range(begin, 90, 9)]
    assert all(len(family) == 1 for family in of(alike))


def test_many_who_share_a_prefix_are_no_family() -> None:
    prompts = [[1] * 90 + [100 + own] * 10 for own in range(LARGEST + 1)]
    assert all(len(family) == 1 for family in of(prompts))
    assert of(prompts[:-1]) == [list(range(LARGEST))]


def test_equal_prompts_are_a_family_and_one_or_none_is_fine() -> None:
    assert of([[1, 2], [1, 2]]) == [[0, 1]]
    assert of([[1, 2]]) == [[0]]
    assert of([]) == []


def test_a_sample_computes_few_documents_for_as_many_answers() -> None:
    prompts = Prompts.of([[7] * 20 + [100 + number // 6] * 80 + [5000 + number] * 5 for number in range(3000)])
    tree = build_tree(prompts)
    groups = group_requests(tree)
    outlook = look_ahead(Seen.nothing(len(groups)), groups, group_caps(groups, np.full(3000, LONGEST)))
    unknown, generator = np.full(3000, -1), np.random.default_rng(0)
    found = choose_sample(
        groups, outlook, prompts.lengths.astype(float), unknown, generator, 0.02, family=families(tree)
    )
    assert len(found) == 60
    documents = found // 6
    assert len(np.unique(documents)) <= 11
    assert np.count_nonzero(np.diff(documents)) <= 11  # those of a document run one after the other
