"""Orders the scan: sorts the tree by density, splits what stands in the way, merges what may stay together (5.2)."""

from dataclasses import dataclass

import numpy as np

from engine_ext.arrays import Column, Floats
from engine_ext.compiled import compiled
from engine_ext.costs.cost import CostModel
from engine_ext.errors import InputError
from engine_ext.plan.resources import NodeLoads, Requests, marginal_density, node_loads, request_loads
from engine_ext.plan.split import cut_tree, parted
from engine_ext.plan.tree import PrefixTree, grow_tree
from engine_ext.plan.tuning import KEEP_SHARING


@dataclass(frozen=True, slots=True)
class Scan:
    """A tree whose leaves, from left to right, go from compute-heavy to memory-heavy.

    `loads` are those of the tree as it is now; `best_saved_s` the compute that sharing saves in depth-first order,
    which no order exceeds. `sorts` counts layer-wise sorts.
    """

    tree: PrefixTree
    loads: NodeLoads
    best_saved_s: float
    sorts: int

    @property
    def sharing_kept(self) -> float:
        """Return the share of the possible sharing that this order keeps."""
        return float(self.loads.saved_s[0]) / self.best_saved_s if self.best_saved_s else 1.0


def order_scan(tree: PrefixTree, requests: Requests, cost: CostModel, keep: float = KEEP_SHARING) -> Scan:
    """Sort, split and sort again until the leaves fall in density or no split is worth its cost; then merge.

    `keep` is the share of the possible sharing that must remain. Each round splits at one of three densities: the
    root's, then those of its two halves. Only a split that costs something makes another sort necessary, so there are
    at most four sorts. With fewer than three leaves there are one or two, because a split needs a shared prefix and a
    leaf on each side.
    """
    if not 0 <= keep <= 1:
        raise InputError(f"the sharing to keep must be from 0 to 1, not {keep}")
    best = float(node_loads(tree, requests, cost).saved_s[0])
    whole = tree
    tree, sorts = sort_layers(tree, node_loads(tree, requests, cost), cost), 1
    for part in ("all", "left", "right"):
        loads = node_loads(tree, requests, cost)
        compute, memory = request_loads(tree, requests, cost)
        if _falls(compute, memory):
            break
        threshold = _threshold(compute, memory, loads.of(0).density, part)
        budget = max(0.0, (1 - keep) * best - (best - float(loads.saved_s[0])))
        segment_s = np.asarray(cost.saved_s(tree.end - tree.begin, tree.begin))
        # Where compute is the bottleneck, a second of it buys the overlap of 1 / density seconds of memory reads.
        worth = max(1.0, loads.of(0).density)
        cut = cut_tree(tree, segment_s, compute - threshold * memory, budget, worth)
        if cut.cost_s == 0:
            continue  # nothing is in the way of this density, or moving it costs more than it gains
        positions, common = parted(tree.common, cut.right)
        tree = grow_tree(tree.order[positions], common, requests.prompt.astype(np.int64))
        tree, sorts = sort_layers(tree, node_loads(tree, requests, cost), cost), sorts + 1
    tree = merge(whole, tree, requests)
    return Scan(tree, node_loads(tree, requests, cost), best, sorts)


def sort_layers(tree: PrefixTree, loads: NodeLoads, cost: CostModel) -> PrefixTree:
    """Sort the children of every node by marginal density, densest first (algorithm 1).

    When a walk comes to a node, the prefix above it is already computed.
    """
    density = marginal_density(tree, loads, cost)
    return walk_in_order(tree, np.lexsort((-density[1:], tree.parent[1:])) + 1)


def walk_in_order(tree: PrefixTree, children: Column) -> PrefixTree:
    """Return the same tree walked in another order; `children` is int64 [nodes - 1], grouped by rising parent."""
    number, first = _renumbered(children, tree.parent, tree.after - np.arange(len(tree)), tree.last - tree.first)
    walk = np.argsort(number)
    parent = tree.parent[walk]
    # Each prompt goes where its leaf has gone.
    leaves = tree.leaves
    order = np.empty_like(tree.order)
    order[first[leaves]] = tree.order
    return PrefixTree(
        order,
        np.where(parent < 0, -1, number[parent]),
        tree.begin[walk],
        tree.end[walk],
        first[walk],
        (first + tree.last - tree.first)[walk],
    )


def merge(whole: PrefixTree, tree: PrefixTree, requests: Requests) -> PrefixTree:
    """Join neighbours that share more than the tree says, as when parts of a split node end up side by side.

    `whole` is the tree before any split. The order stays the same, and sharing can only rise.
    """
    leaf_of = np.empty(len(whole.order), dtype=np.int64)
    leaf_of[whole.order] = whole.leaves
    common = common_in(whole.parent, whole.end, leaf_of[tree.order])
    if np.array_equal(common, tree.common):
        return tree
    return grow_tree(tree.order, common, requests.prompt.astype(np.int64))


def saved_by_order(whole: PrefixTree, order: Column, cost: CostModel) -> float:
    """Return the seconds of compute saved if each prompt reuses what it shares with the one before it in `order`."""
    return float(cost.saved_s(shared_by_order(whole, order)).sum())


def shared_by_order(whole: PrefixTree, order: Column) -> Column:
    """Return the tokens that each prompt shares with the one before it; int64 [prompts], by place in `order`."""
    leaf_of = np.empty(len(whole.order), dtype=np.int64)
    leaf_of[whole.order] = whole.leaves
    return common_in(whole.parent, whole.end, leaf_of[order])


def _falls(compute: Floats, memory: Floats) -> bool:
    """Return whether densities never rise from one leaf to the next (C1 of section 5.4), except by rounding."""
    a, b = compute[:-1] * memory[1:], compute[1:] * memory[:-1]
    return bool(np.all(a >= b - 1e-9 * np.abs(b)))


def _threshold(compute: Floats, memory: Floats, density: float, part: str) -> float:
    """Return the density to split at: that of all requests, or of those above or below it."""
    if part == "all" or not np.isfinite(density):
        return density if np.isfinite(density) else 0.0
    chosen = (compute >= density * memory) == (part == "left")
    reads = float(memory[chosen].sum())
    return float(compute[chosen].sum()) / reads if reads else density


@compiled
def _renumbered(children: Column, parent: Column, sizes: Column, leaves: Column) -> tuple[Column, Column]:
    """Return new numbers and first leaves of the nodes for a walk in the order of `children`.

    `children` is grouped by rising parent.
    """
    number, first = np.zeros(len(parent), np.int64), np.zeros(len(parent), np.int64)
    last_parent, next_number, next_leaf = -1, 0, 0
    for child in children:
        if parent[child] != last_parent:
            last_parent = parent[child]
            next_number, next_leaf = number[last_parent] + 1, first[last_parent]
        number[child], first[child] = next_number, next_leaf
        next_number += sizes[child]
        next_leaf += leaves[child]
    return number, first


@compiled
def common_in(parent: Column, end: Column, leaves: Column) -> Column:
    """Return the tokens that each leaf shares with the one before it: the end of their lowest common ancestor."""
    common = np.zeros(len(leaves), dtype=np.int64)
    for k in range(1, len(leaves)):
        a, b = leaves[k - 1], leaves[k]
        while a != b:  # the later in preorder cannot be above the other
            if a > b:
                a = parent[a]
            else:
                b = parent[b]
        common[k] = end[a]
    return common
