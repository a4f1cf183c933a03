"""Groups requests whose outputs have similar lengths: those below one large node of the tree, and of one kind."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine_ext.arrays import Column, Floats
from engine_ext.compiled import compiled
from engine_ext.plan.tree import PrefixTree
from engine_ext.plan.tuning import ALIKE, MOST_NODES, MOST_SMALL_TASKS, SMALLEST_GROUP, SMALLEST_TASK, UNLIKE


@dataclass(frozen=True, slots=True)
class Groups:
    """A tree of groups, and the group of each prompt.

    `of` is int64 [prompts], the group of each prompt; `parent` is int64 [groups], -1 for group 0, which holds all. A
    parent has a smaller number than its children. A group without answers of its own borrows from its parent; siblings
    lend to each other through it. `leaning` is float64 [groups]: how many of a group's own answers its parent's
    estimate counts for.
    """

    of: Column
    parent: Column
    leaning: Floats

    @classmethod
    def unlike(cls, of: Column, parent: Column) -> "Groups":
        """Build groups of different tasks: one answer of a group's own outweighs all of its parent's."""
        return cls(of, parent, np.full(len(parent), UNLIKE))

    def __len__(self) -> int:
        return len(self.parent)

    @property
    def levels(self) -> Column:
        """Return how many groups are above each; int64 [groups]."""
        level = np.zeros(len(self.parent), dtype=np.int64)
        for group in range(1, len(self.parent)):
            level[group] = level[self.parent[group]] + 1
        return level


def group_requests(tree: PrefixTree, kinds: Column | None = None) -> Groups:
    """Group each request by the deepest large node above it, divided by kind where each kind is large enough.

    `kinds` is int64 [prompts], equal for requests that are alike in something else, such as their batch or max_tokens.
    """
    number, parent = _numbered(tree.parent, _large_nodes(tree))
    of = np.zeros(len(tree.order), dtype=np.int64)
    of[tree.order] = number[tree.leaves]
    of, parent = _apart(of, parent)
    if kinds is not None:
        of, parent = _by_kind(of, parent, kinds, SMALLEST_TASK)
    octave = np.log2(np.maximum(tree.lengths, 1)).astype(np.int64)
    tasks = len(parent)
    of, parent = _by_kind(of, parent, octave, SMALLEST_GROUP)
    return Groups(of, parent, np.where(np.arange(len(parent)) < tasks, UNLIKE, ALIKE))


def _large_nodes(tree: PrefixTree) -> NDArray[np.bool_]:
    """Mark nodes with enough requests; if there are too many, the highest, and the largest of equally high ones.

    High nodes separate tasks, deep ones separate the cases of one task; a task may be much smaller than a case.
    """
    size = tree.last - tree.first
    large = size >= SMALLEST_GROUP
    is_task = size[tree.parent] == size[0]  # nothing but what all prompts begin with is above it
    small_tasks = is_task & (size >= SMALLEST_TASK) & ~large
    if np.count_nonzero(small_tasks) <= MOST_SMALL_TASKS:
        large |= small_tasks
    large[0] = True
    if np.count_nonzero(large) > MOST_NODES:
        nodes = np.flatnonzero(large)
        highest = nodes[np.lexsort((-size[nodes], _levels(tree.parent, large)[nodes]))][:MOST_NODES]
        large = np.zeros_like(large)
        large[highest] = True
    return large


def _apart(of: Column, parent: Column) -> tuple[Column, Column]:
    """Move requests that are in no child of their group into a child of their own.

    A mean over the other children says little about them.
    """
    direct = np.bincount(of, minlength=len(parent))
    chosen = np.isin(np.arange(len(parent)), parent) & (direct >= SMALLEST_GROUP)
    number = np.where(chosen, len(parent) + np.cumsum(chosen) - 1, np.arange(len(parent)))
    return number[of], np.concatenate([parent, np.flatnonzero(chosen)])


def _by_kind(of: Column, parent: Column, kinds: Column, smallest: int) -> tuple[Column, Column]:
    """Add children to each group for those of its kinds that have `smallest` requests and are not the whole group."""
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
    return number[members], np.concatenate([parent, above[chosen]])


@compiled
def _levels(parent: Column, large: NDArray[np.bool_]) -> Column:
    """Return how many large nodes are above each node."""
    level = np.zeros(len(parent), dtype=np.int64)
    for node in range(1, len(parent)):
        level[node] = level[parent[node]] + large[parent[node]]
    return level


@compiled
def _numbered(parent: Column, large: NDArray[np.bool_]) -> tuple[Column, Column]:
    """Return the group of each node, and the parent of each group."""
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
