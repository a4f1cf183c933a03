"""Finds prompts that share most of their tokens with a few others, such as the questions about one document."""

import numpy as np

from engine_ext.arrays import Column
from engine_ext.plan.tree import PrefixTree
from engine_ext.plan.tuning import LARGEST_FAMILY


def find_families(tree: PrefixTree) -> Column:
    """Return the family of each prompt, as a number that only its members have; int64 [prompts], by prompt.

    A family is the prompts below one node of the tree, at most LARGEST_FAMILY, that have at least half of their tokens
    in common. Tokens that more than LARGEST_FAMILY prompts share do not count. Where such nodes are one below the
    other, the highest makes the family. Every other prompt is a family of its own.
    """
    size = tree.last - tree.first
    is_small = size <= LARGEST_FAMILY
    is_top = is_small & ((tree.parent < 0) | (size[tree.parent] > LARGEST_FAMILY))
    # In preorder, the last top node before a node is the one above it.
    top = np.maximum.accumulate(np.where(is_top, np.arange(len(tree)), 0))
    common = tree.begin[top]
    before = np.concatenate([[0], np.cumsum(tree.end[tree.leaves])])
    tokens = before[tree.last] - before[tree.first] - common * size
    found = np.flatnonzero(is_small & (size > 1) & (2 * (tree.end - common) * size >= tokens))
    first, last = tree.first[found], tree.last[found]
    is_outer = first >= np.concatenate([[0], np.maximum.accumulate(last)])[: len(found)]
    by_place = _filled(len(tree.order), first[is_outer], last[is_outer])
    family = np.empty_like(by_place)
    family[tree.order] = by_place
    return family


def _filled(count: int, first: Column, last: Column) -> Column:
    """Return the numbers 0 to `count` - 1, in which each range [`first`, `last`) has its first number throughout.

    The ranges are in order, and do not overlap.
    """
    edges = np.zeros(count + 1, dtype=np.int64)
    edges[first] += 1
    edges[last] -= 1
    numbers = np.where(np.cumsum(edges)[:count] > 0, 0, np.arange(count))
    numbers[first] = first
    return np.maximum.accumulate(numbers)
