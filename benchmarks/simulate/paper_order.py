"""Computes BlendServe's own order of requests (sections 5.1, 5.2, 5.4, algorithms 1 and 2), to compare with ours."""

import numpy as np
from numpy.typing import NDArray

from engine_ext.arrays import Column, Floats
from engine_ext.compiled import compiled
from engine_ext.costs.cost import CostModel
from engine_ext.errors import InputError
from engine_ext.plan.order import saved_by_order, walk_in_order
from engine_ext.plan.resources import Requests
from engine_ext.plan.tree import PrefixTree
from engine_ext.plan.tuning import KEEP_SHARING

Marks = NDArray[np.bool_]

ROUNDING = 1e-9


def paper_order(tree: PrefixTree, requests: Requests, cost: CostModel, keep: float = KEEP_SHARING) -> Column:
    """Return requests from compute-heavy to memory-heavy as BlendServe orders them; int64 [requests].

    Layers are sorted, nodes split and layers sorted again, until the leaves fall in density or no node is cheap enough
    to split. Where the paper is silent or contradicts itself:

    - A set's density is that of its requests alone, so the prefix above it is computed once; it does not change when
      the set moves to the root, and UPDATE_SUBTREE_DENSITY has nothing to do.
    - Memory reads are those of the expected output, without its variance; the cost model's quadratic term stays.
    - Splitting is algorithm 2's: a node is split into all its children, not only into outliers as in section 5.2.
    - "Length of prefix to ptr" counts the node's own tokens, since line 5 subtracts them again; `t` is in tokens.
    - A leaf that algorithm 2 reaches is listed too: as printed it would vanish, because 0 children never exceed
      t.
    - Each round runs algorithm 2 with the same t on the tree that the last one left, whose root has more children.
    - t is the largest that keeps `keep` of the sharing in seconds, as measured on the order. It is found by bisection
      over the values at which a node begins to be split, though sharing need not fall steadily between them.
    - Equal densities stay in the order of the sorted tree.
    - Merging neighbours that share a prefix (A.2) does not change the order, and counts as sharing kept.

    Raises InputError if `keep` is not from 0 to 1.
    """
    if not 0 <= keep <= 1:
        raise InputError(f"the sharing to keep must be from 0 to 1, not {keep}")
    walked = sort_by_density(tree, set_density(tree, requests, cost))
    density = set_density(walked, requests, cost)
    order = walked.order
    if _falls(density[walked.leaves]):
        return order
    enough = keep * saved_by_order(walked, order, cost) * (1 - ROUNDING)
    thresholds = np.unique(_thresholds(walked.parent, walked.end, _children(walked))[1:])
    low, high = 0, len(thresholds)
    while low < high:
        middle = (low + high) // 2
        tried = split_order(walked, density, float(thresholds[middle]))
        if saved_by_order(walked, tried, cost) >= enough:
            order, low = tried, middle + 1
        else:
            high = middle
    return order


def set_density(tree: PrefixTree, requests: Requests, cost: CostModel) -> Floats:
    """Return rho(R) = (1 - s) T_comp / T_mem of the requests below each node alone (section 5.1); float64 [nodes]."""
    walked, leaves = requests.at(tree.order), tree.leaves
    # Segments are summed at the parent, so that leaves that are alike get exactly the same density.
    segment_s = cost.saved_s(tree.end - tree.begin, tree.begin)
    compute_s = np.bincount(tree.parent[1:], weights=segment_s[1:], minlength=len(tree)).astype(np.float64)
    compute_s[leaves] += cost.compute_s(np.zeros(len(walked)), walked.output)
    memory_s = np.zeros(len(tree))
    memory_s[leaves] = cost.memory_s(walked.prompt, walked.output)
    net_s, memory_s = cost.saved_s(tree.end) + _sums(tree.parent, compute_s), _sums(tree.parent, memory_s)
    return np.divide(net_s, memory_s, out=np.full(len(tree), np.inf), where=memory_s > 0)


def sort_by_density(tree: PrefixTree, density: Floats) -> PrefixTree:
    """Sort the children of every node by density, densest first (algorithm 1)."""
    return walk_in_order(tree, np.lexsort((-density[1:], tree.parent[1:])) + 1)


def split_order(walked: PrefixTree, density: Floats, threshold: float) -> Column:
    """Split a sorted tree and sort it again until nothing changes; return the order (algorithm 2, 5.4).

    `threshold` is t, in tokens.
    """
    children, leaf_density = _children(walked), density[walked.leaves]
    split = np.zeros(len(walked), dtype=np.bool_)
    split[0] = True
    while _split_round(walked.parent, walked.end, children, split, threshold):
        places = _places(walked, density, split)
        if _falls(leaf_density[places]):
            break
    return walked.order[_places(walked, density, split)]


def _places(walked: PrefixTree, density: Floats, split: Marks) -> Column:
    """Return the places of leaves in the walk when all unsplit nodes stand sorted under the root."""
    whole = np.flatnonzero(split[walked.parent[1:]] & ~split[1:]) + 1
    whole = whole[np.argsort(-density[whole], kind="stable")]
    sizes = walked.last[whole] - walked.first[whole]
    return np.repeat(walked.first[whole] - np.cumsum(sizes) + sizes, sizes) + np.arange(len(walked.order))


def _falls(density: Floats) -> bool:
    """Return whether condition C1 holds, except by rounding."""
    return bool(np.all(density[:-1] >= density[1:] * (1 - ROUNDING)))


def _children(tree: PrefixTree) -> Column:
    return np.bincount(tree.parent[1:], minlength=len(tree))


@compiled
def _sums(parent: Column, values: Floats) -> Floats:
    """Return the sum of the values of each node and all nodes below it."""
    sums = values.copy()
    for node in range(len(parent) - 1, 0, -1):
        sums[parent[node]] += sums[node]
    return sums


@compiled
def _thresholds(parent: Column, end: Column, children: Column) -> Floats:
    """Return the least t that splits each node in the first round; for a leaf, that of its parent."""
    least, shares = np.zeros(len(parent)), np.ones(len(parent))
    for node in range(len(parent)):
        if node > 0:
            shares[node] = shares[parent[node]] * children[parent[node]]
            needed = end[node] * children[node] * shares[node] * (1 + ROUNDING)
            least[node] = max(least[parent[node]], needed)
    return least


@compiled
def _split_round(parent: Column, end: Column, children: Column, split: Marks, threshold: float) -> bool:
    """Run algorithm 2 on the tree whose root has all unsplit nodes as children.

    Marks nodes, and returns whether there are new ones.
    """
    under_root = 0
    for node in range(1, len(parent)):
        if split[parent[node]] and not split[node]:
            under_root += 1
    given = np.full(len(parent), -1.0)  # to each child; -1 where the node stays whole
    given[0] = threshold / max(under_root, 1)
    found = False
    for node in range(1, len(parent)):
        budget = given[parent[node]]
        if split[node]:
            given[node] = given[0]
        elif children[node] > 0 and budget >= 0 and end[node] * children[node] <= budget:
            split[node] = found = True
            given[node] = budget / children[node]
    return found
