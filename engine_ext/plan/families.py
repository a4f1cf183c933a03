"""Finds prompts that share most of their tokens with a few others, such as the questions about one document."""

import numpy as np

from engine_ext.arrays import Column
from engine_ext.plan.tree import PrefixTree

LARGEST = 16  # prompts of a family; if more share a prefix, computing it once again costs each of them little


def families(tree: PrefixTree) -> Column:
    """Return the family of each prompt, as a number that only its members have; int64 [prompts], by prompt.

    The members of a family together have at most half as many distinct tokens as they have tokens, beside what they
    share with more than LARGEST prompts. Any other prompt is a family of its own.
    """
    size = tree.last - tree.first
    is_top = (size > 1) & (size <= LARGEST) & ((tree.parent < 0) | (size[tree.parent] > LARGEST))
    lengths = np.concatenate([[0], np.cumsum(tree.end[tree.leaves])])
    distinct = np.concatenate([[0], np.cumsum(tree.end - tree.begin)])
    tokens = lengths[tree.last] - lengths[tree.first] - tree.begin * size
    top = np.flatnonzero(is_top & (2 * (distinct[tree.after] - distinct[:-1]) <= tokens))
    by_place = np.arange(len(tree.order))
    for node in top.tolist():
        by_place[tree.first[node] : tree.last[node]] = tree.first[node]
    family = np.empty_like(by_place)
    family[tree.order] = by_place
    return family
