"""The prefix tree of a window, built by sorting and longest common prefixes instead of inserting one by one."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine_ext.plan.prompts import Prompts, TokenIds

Column = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """A radix tree over prompts in depth-first order.

    `order`: int64 [prompts], the prompts as a depth-first walk meets them. Node k stands for the tokens at depths
    [`begin[k]`, `end[k]`) that the prompts `order[first[k]:last[k]]` share; `parent[k]` is -1 at the root, node 0.
    Nodes are in preorder: those below node k are [k + 1, `after[k]`).
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
        """The first node in preorder that is neither node k nor below it; int64 [nodes]."""
        after = np.searchsorted(self.first, self.last, side="left")
        after[0] = len(self)
        return after

    @property
    def distinct_tokens(self) -> int:
        """Prompt tokens to compute when every shared prefix is computed once."""
        return int(np.sum(self.end - self.begin))


def build_tree(prompts: Prompts) -> PrefixTree:
    """Sort the prompts by their token ids (N log N comparisons) and read the tree off their common prefixes."""
    # Big-endian bytes compare as the token ids do, and Python compares bytes with memcmp.
    keys = [prompts[i].astype(">u4").tobytes() for i in range(len(prompts))]
    order = np.array(sorted(range(len(prompts)), key=keys.__getitem__), dtype=np.int64)
    lengths = np.diff(prompts.starts)[order]
    common = _common_prefixes(prompts, order)

    parent, begin, end, first, last = [-1], [0], [0], [0], [len(order)]
    path = [0]  # the nodes from the root to the prompt before, by rising depth
    for position in range(len(order)):
        shared = int(common[position])
        below = None
        while end[path[-1]] > shared:
            below = path.pop()
            last[below] = position
        if below is not None and end[path[-1]] < shared:
            # The prompt leaves the edge to `below` half-way: split it.
            middle = len(parent)
            parent.append(path[-1])
            begin.append(begin[below])
            end.append(shared)
            first.append(first[below])
            last.append(len(order))
            parent[below], begin[below] = middle, shared
            path.append(middle)
        if lengths[position] > shared:
            parent.append(path[-1])
            begin.append(shared)
            end.append(int(lengths[position]))
            first.append(position)
            last.append(len(order))
            path.append(len(parent) - 1)
    columns = [np.array(column, dtype=np.int64) for column in (parent, begin, end, first, last)]
    return PrefixTree(order, *_in_preorder(*columns))


def _in_preorder(parent: Column, begin: Column, end: Column, first: Column, last: Column) -> list[Column]:
    """The same nodes, numbered so that a node comes before its descendants and these before its next sibling."""
    walk = np.lexsort((begin, first))
    number = np.empty_like(walk)
    number[walk] = np.arange(len(walk))
    parent = np.where(parent[walk] < 0, -1, number[parent[walk]])
    return [parent, begin[walk], end[walk], first[walk], last[walk]]


def _common_prefixes(prompts: Prompts, order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Length of the prefix that each prompt shares with the one before it in `order`; int64 [prompts]."""
    common = np.zeros(len(order), dtype=np.int64)
    for position in range(1, len(order)):
        common[position] = common_prefix(prompts[order[position - 1]], prompts[order[position]])
    return common


def common_prefix(a: TokenIds, b: TokenIds) -> int:
    """Number of leading tokens that are equal."""
    n = min(len(a), len(b))
    differing = a[:n] != b[:n]
    at = int(np.argmax(differing)) if n else 0
    return at if n and differing[at] else n
