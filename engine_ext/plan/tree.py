"""Builds the prefix tree of a window by sorting and longest common prefixes, instead of inserting one by one."""

from dataclasses import dataclass

import numpy as np

from engine_ext.arrays import Column
from engine_ext.compiled import brief, compiled
from engine_ext.plan.prompts import Prompts, TokenIds


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """A radix tree over prompts; each prompt is a leaf, and the leaves are in the order of a walk.

    `order` is int64 [prompts], the prompts as the walk meets them. Node k holds the tokens at depths [`begin[k]`,
    `end[k]`) that the prompts `order[first[k]:last[k]]` share; `parent[k]` is -1 at the root, node 0. Nodes are in
    preorder: those below node k are [k + 1, `after[k]`). A leaf holds the tokens that its prompt shares with no other,
    which may be none.
    """

    order: Column
    parent: Column
    begin: Column
    end: Column
    first: Column
    last: Column

    def __len__(self) -> int:
        return len(self.parent)

    @property
    def after(self) -> Column:
        """Return for each node k the first node in preorder that is neither k nor below it; int64 [nodes]."""
        after = np.searchsorted(self.first, self.last, side="left")
        after[0] = len(self)
        return after

    @property
    def leaves(self) -> Column:
        """Return the leaf of each prompt in the order of the walk; int64 [prompts]."""
        childless = np.ones(len(self), dtype=np.bool_)
        childless[self.parent[1:]] = False
        return np.flatnonzero(childless)[: len(self.order)]

    @property
    def lengths(self) -> Column:
        """Return the tokens of each prompt; int64 [prompts], by prompt."""
        lengths = np.empty_like(self.order)
        lengths[self.order] = self.end[self.leaves]
        return lengths

    @property
    def common(self) -> Column:
        """Return the tokens that each prompt shares with the one before it in the walk; int64 [prompts]."""
        common = np.zeros(len(self.order), dtype=np.int64)
        # Siblings part where their parent ends; the deepest node that begins at a prompt comes last in preorder.
        starts = self.first[1:] > self.first[self.parent[1:]]
        common[self.first[1:][starts]] = self.end[self.parent[1:]][starts]
        return common

    @property
    def distinct_tokens(self) -> int:
        """Return the prompt tokens to compute if every shared prefix is computed once."""
        return int(np.sum(self.end - self.begin))


def build_tree(prompts: Prompts) -> PrefixTree:
    """Sort the prompts by their token ids and read the tree off their common prefixes.

    Groups of prompts that share a prefix are sorted by the token after it, so that each token of a shared prefix is
    read once. That takes N log N comparisons, and reads as many tokens as the prefixes have that tell prompts apart.
    """
    order, common = _sorted(prompts.tokens, prompts.starts)
    if prompts.sizes is not None:
        sums = np.concatenate([[0], np.cumsum(prompts.sizes)])
        starts = prompts.starts[order]
        common = sums[starts + common] - sums[starts]
    return grow_tree(order, common, prompts.lengths)


def grow_tree(order: Column, common: Column, lengths: Column) -> PrefixTree:
    """Build the tree whose leaves are the prompts in this order.

    `common` is int64 [prompts], the tokens that each prompt shares with the one before it; `lengths` is int64
    [prompts], by prompt.
    """
    parent, begin, end, first, last = _grown(common, lengths[order])
    walk = np.lexsort((begin, first))
    number = np.empty_like(walk)
    number[walk] = np.arange(len(walk))
    above = parent[walk]
    return PrefixTree(order, np.where(above < 0, -1, number[above]), begin[walk], end[walk], first[walk], last[walk])


@compiled
def _sorted(tokens: TokenIds, starts: Column) -> tuple[Column, Column]:
    """Return prompts in the order of their tokens, and how many tokens each shares with the one before it."""
    order = np.arange(len(starts) - 1)
    common = np.zeros(len(order), dtype=np.int64)
    groups = [(0, len(order), 0)]  # runs of `order` that are equal up to a depth and still to be sorted beyond it
    while len(groups) > 0:
        low, high, depth = groups.pop()
        if high - low < 2:
            continue
        depth = _equal_until(tokens, starts, order[low:high], depth)
        keys = np.empty(high - low, dtype=np.int64)
        for k in range(high - low):
            at = starts[order[low + k]] + depth
            keys[k] = tokens[at] if at < starts[order[low + k] + 1] else -1
        by_key = np.argsort(keys, kind="mergesort")
        order[low:high] = order[low:high][by_key]
        run = low
        for k in range(low + 1, high + 1):
            if k == high or keys[by_key[k - low]] != keys[by_key[run - low]]:
                if run > low:
                    common[run] = depth
                if keys[by_key[run - low]] >= 0:
                    groups.append((run, k, depth + 1))
                else:  # they end here: identical prompts
                    common[run + 1 : k] = depth
                run = k
    return order, common


@compiled
def _equal_until(tokens: TokenIds, starts: Column, group: Column, depth: int) -> int:
    """Return the depth up to which all prompts of the group are equal, at least `depth`."""
    begin = starts[group[0]]
    equal = starts[group[0] + 1] - begin
    for prompt in group[1:]:
        other = starts[prompt]
        equal = min(equal, starts[prompt + 1] - other)
        at = depth
        while at < equal and tokens[begin + at] == tokens[other + at]:
            at += 1
        equal = at
        if equal == depth:
            break
    return int(equal)


@compiled
def _grown(common: Column, lengths: Column) -> tuple[Column, Column, Column, Column, Column]:
    """Return parent, begin, end, first and last of the nodes; parents may come before or after their children."""
    size = 2 * len(lengths) + 1
    parent, begin, end = np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size, np.int64)
    first, last = np.empty(size, np.int64), np.full(size, len(lengths), np.int64)
    parent[0], begin[0], end[0], first[0] = -1, 0, 0, 0
    nodes = 1
    path = [0]  # the nodes from the root to the prompt before, by rising depth
    for position in range(len(lengths)):
        shared = common[position]
        below = -1
        if position > 0:
            below = path.pop()
            last[below] = position
            while end[path[-1]] > shared:
                below = path.pop()
                last[below] = position
        if below >= 0 and end[path[-1]] < shared:
            # The prompt leaves the edge to `below` partway: split the edge.
            parent[nodes], begin[nodes], end[nodes], first[nodes] = path[-1], begin[below], shared, first[below]
            parent[below], begin[below] = nodes, shared
            path.append(nodes)
            nodes += 1
        parent[nodes], begin[nodes], end[nodes], first[nodes] = path[-1], shared, lengths[position], position
        path.append(nodes)
        nodes += 1
    return parent[:nodes], begin[:nodes], end[:nodes], first[:nodes], last[:nodes]


@brief
def common_prefix(a: TokenIds, b: TokenIds) -> int:
    """Return the number of leading tokens that are equal."""
    least = min(len(a), len(b))
    for at in range(least):
        if a[at] != b[at]:
            return at
    return least
