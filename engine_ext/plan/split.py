"""Chooses which nodes to split in two, so that dense and light requests can be separated (section 5.2)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine_ext.arrays import Column, Floats
from engine_ext.compiled import compiled
from engine_ext.plan.tree import PrefixTree
from engine_ext.plan.tuning import BISECTIONS

Choices = NDArray[np.int8]

LEFT, RIGHT, BOTH = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Cut:
    """Holds the leaves that go right, bool [prompts] in the walk's order, and what that costs.

    `cost_s` is the seconds of compute that sharing then no longer saves.
    """

    right: NDArray[np.bool_]
    cost_s: float


def cut_tree(tree: PrefixTree, segment_s: Floats, excess_s: Floats, budget_s: float, worth: float = 1.0) -> Cut:
    """Cut the tree in two, moving as much imbalance as `budget_s` seconds of recomputed prefixes can pay for.

    `excess_s` is float64 [prompts] in the walk's order, compute beyond what balances a request's memory reads: a
    request above zero belongs left. `segment_s` is float64 [nodes], the cost of computing a node's segment once. A node
    whose requests go to both sides is computed twice; `worth` is the least imbalance to move for a second of that.
    Choosing these nodes is a knapsack on a tree: for a given price of a second it is solved from the leaves up, and the
    price rises until the budget holds.

    BlendServe's algorithm 2 instead splits a node into all its children; here, children that agree stay together.
    """
    left, right = _masses(tree.parent, tree.leaves, np.maximum(excess_s, 0.0), np.maximum(-excess_s, 0.0))
    segment_s = segment_s.copy()
    segment_s[0] = 0.0  # the root has no tokens to compute

    def at_price(price: float) -> tuple[Choices, float]:
        return _choices(tree.parent, segment_s, left, right, price)

    # A Lagrangian: at a price per second of recomputing, each node is decided on its own (docs/planner.md).
    low, high = worth, worth * 2.0**40
    choice, cost = at_price(low)
    if cost > budget_s:
        choice, cost = at_price(high)
        for _ in range(BISECTIONS):
            middle = float(np.sqrt(low * high))
            tried, paid = at_price(middle)
            if paid > budget_s:
                low = middle
            else:
                high, choice, cost = middle, tried, paid
        if cost > budget_s:
            return Cut(np.zeros(len(tree.order), dtype=np.bool_), 0.0)
    return Cut(_sides(tree.parent, choice)[tree.leaves] == RIGHT, cost)


def parted(common: Column, right: NDArray[np.bool_]) -> tuple[Column, Column]:
    """Return positions of the left leaves, then of the right ones, and what each then shares with the one before it."""
    return _parted(common, right)


@compiled
def _masses(parent: Column, leaves: Column, left: Floats, right: Floats) -> tuple[Floats, Floats]:
    """Sum `left` and `right` over the leaves below each node."""
    sums = np.zeros((2, len(parent)))
    for k in range(len(leaves)):
        sums[0, leaves[k]] = left[k]
        sums[1, leaves[k]] = right[k]
    for node in range(len(parent) - 1, 0, -1):
        sums[0, parent[node]] += sums[0, node]
        sums[1, parent[node]] += sums[1, node]
    return sums[0], sums[1]


@compiled
def _choices(parent: Column, segment_s: Floats, left: Floats, right: Floats, price: float) -> tuple[Choices, float]:
    """Choose for each node the best of all left, all right, or cut with its children's best; return the cost too."""
    choice = np.empty(len(parent), dtype=np.int8)
    gain, cost = np.zeros(len(parent)), np.zeros(len(parent))  # of the children's best
    total = 0.0
    for node in range(len(parent) - 1, -1, -1):
        paid = cost[node] + segment_s[node]
        cut = gain[node] - price * segment_s[node]
        if cut > left[node] and cut > right[node]:
            choice[node], best, spent = BOTH, cut, paid
        elif left[node] >= right[node]:
            choice[node], best, spent = LEFT, left[node], 0.0
        else:
            choice[node], best, spent = RIGHT, right[node], 0.0
        if node > 0:
            gain[parent[node]] += best
            cost[parent[node]] += spent
        else:
            total = spent
    return choice, total


@compiled
def _sides(parent: Column, choice: Choices) -> Choices:
    """Return what each node does, given what those above it do."""
    side = choice.copy()
    for node in range(1, len(parent)):
        if side[parent[node]] != BOTH:
            side[node] = side[parent[node]]
    return side


@compiled
def _parted(common: Column, right: NDArray[np.bool_]) -> tuple[Column, Column]:
    order, shared = np.empty(len(common), np.int64), np.empty(len(common), np.int64)
    written = 0
    for side in (False, True):
        least = 0  # what this side's next leaf shares with its last one: the least since then
        for k in range(len(common)):
            least = min(least, common[k])
            if right[k] == side:
                order[written], shared[written] = k, least
                written += 1
                least = common[k + 1] if k + 1 < len(common) else 0
    return order, shared
