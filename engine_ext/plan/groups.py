"""Groups of requests whose outputs are alike in length: those below a large node of the tree, and of one kind."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine_ext.plan.compiled import compiled
from engine_ext.plan.tree import Column, PrefixTree

SMALLEST = 32  # requests that make a group
MOST_NODES = 512  # that make groups; kinds may double them


@dataclass(frozen=True, slots=True)
class Groups:
    """`of`: int64 [prompts], the group of each prompt; `parent`: int64 [groups], -1 for group 0, which holds all.

    Parents are numbered below their children. A group without answers of its own borrows from its parent; siblings lend
    to each other through it.
    """

    of: Column
    parent: Column

    def __len__(self) -> int:
        return len(self.parent)


def group_requests(tree: PrefixTree, kinds: Column | None = None) -> Groups:
    """The deepest large node above each request, divided by kind where each kind is large enough.

    `kinds`: int64 [prompts], equal for requests that are alike in something else, such as their batch or max_tokens.
    """
    size = tree.last - tree.first
    smallest = SMALLEST
    while np.count_nonzero(size >= smallest) > MOST_NODES:
        smallest *= 2
    large = size >= smallest
    large[0] = True
    number, parent = _numbered(tree.parent, large)
    of = np.zeros(len(tree.order), dtype=np.int64)
    of[tree.order] = number[tree.leaves]
    of, parent = _apart(of, parent, smallest)
    if kinds is None:
        return Groups(of, parent)
    return _by_kind(of, parent, kinds, smallest)


def _apart(of: Column, parent: Column, smallest: int) -> tuple[Column, Column]:
    """Requests that are in no child of their group become a child of their own: they are no mean of the others."""
    direct = np.bincount(of, minlength=len(parent))
    chosen = np.isin(np.arange(len(parent)), parent) & (direct >= smallest)
    number = np.where(chosen, len(parent) + np.cumsum(chosen) - 1, np.arange(len(parent)))
    return number[of], np.concatenate([parent, np.flatnonzero(chosen)])


def _by_kind(of: Column, parent: Column, kinds: Column, smallest: int) -> Groups:
    """Children of each group for its kinds that are large and not all of it."""
    _, kinds = np.unique(kinds, return_inverse=True)
    pairs, members, counts = np.unique(
        of * (int(kinds.max(initial=0)) + 1) + kinds, return_inverse=True, return_counts=True
    )
    above = pairs // (int(kinds.max(initial=0)) + 1)
    alone = counts == np.bincount(of, minlength=len(parent))[above]
    chosen = (counts >= smallest) & ~alone
    most = max(0, MOST_NODES * 2 - len(parent))
    if np.count_nonzero(chosen) > most:
        largest = np.argsort(-np.where(chosen, counts, 0), kind="stable")[:most]
        chosen = np.zeros_like(chosen)
        chosen[largest] = True
    number = np.where(chosen, len(parent) + np.cumsum(chosen) - 1, above)
    return Groups(number[members], np.concatenate([parent, above[chosen]]))


@compiled
def _numbered(parent: Column, large: NDArray[np.bool_]) -> tuple[Column, Column]:
    """The group of each node, and the parent of each group."""
    number = np.zeros(len(parent), dtype=np.int64)
    above = [-1]
    for node in range(1, len(parent)):
        group = int(number[parent[node]])
        if large[node]:
            number[node] = len(above)
            above.append(group)
        else:
            number[node] = group
    return number, np.array(above)
