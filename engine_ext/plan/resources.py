"""Computes what the requests below each node of the tree cost and how dense they are (BlendServe section 5.1)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from engine_ext.arrays import Floats
from engine_ext.compiled import compiled
from engine_ext.costs.cost import CostModel, Load
from engine_ext.plan.tree import PrefixTree


@dataclass(frozen=True, slots=True)
class NodeLoads:
    """Holds seconds by node of a tree, each over all requests below the node; float64 [nodes].

    `saved_s` is the compute that sharing prefixes inside the node's subtree saves. Prefixes above the node, which it
    shares with other nodes, count further up.
    """

    compute_s: Floats
    saved_s: Floats
    memory_s: Floats

    @property
    def density(self) -> Floats:
        """Return rho = (1 - s) T_comp / T_mem by node; infinite where nothing is read."""
        with np.errstate(divide="ignore", invalid="ignore"):
            # Sharing saves compute only: decoding reads the KV cache of the whole prompt all the same (section 3.3).
            density = (self.compute_s - self.saved_s) / self.memory_s
        return np.where(self.memory_s > 0, density, np.inf)

    def of(self, node: int) -> Load:
        return Load(float(self.compute_s[node]), float(self.saved_s[node]), float(self.memory_s[node]))


@dataclass(frozen=True, slots=True)
class Requests:
    """Holds the lengths of requests in tokens; float64 [requests], in the order of the prompts, not of a tree.

    `output_squares` is the mean of the output's square; for a known output it is the square itself.
    """

    prompt: Floats
    output: Floats
    output_squares: Floats

    @classmethod
    def exact(cls, prompt: ArrayLike, output: ArrayLike) -> "Requests":
        p, d = np.asarray(prompt, dtype=np.float64), np.asarray(output, dtype=np.float64)
        return cls(p, d, d * d)

    def __len__(self) -> int:
        return len(self.prompt)

    def at(self, places: NDArray[np.int64]) -> "Requests":
        return Requests(self.prompt[places], self.output[places], self.output_squares[places])

    def compute_s(self, cost: CostModel) -> Floats:
        return cost.compute_s(self.prompt, self.output)

    def memory_s(self, cost: CostModel) -> Floats:
        return cost.memory_s(self.prompt, self.output, self.output_squares)


def node_loads(tree: PrefixTree, requests: Requests, cost: CostModel) -> NodeLoads:
    """Return the loads of every node of the tree."""
    walked = requests.at(tree.order)
    # All prompts below a node share its segment, and only one of them computes it.
    sharing = cost.saved_s(tree.end - tree.begin, tree.begin) * np.maximum(tree.last - tree.first - 1, 0)
    return NodeLoads(
        compute_s=_between(walked.compute_s(cost), tree.first, tree.last),
        saved_s=_between(sharing, np.arange(len(tree)), tree.after),
        memory_s=_between(walked.memory_s(cost), tree.first, tree.last),
    )


def marginal_density(tree: PrefixTree, loads: NodeLoads, cost: CostModel) -> Floats:
    """Return each node's density if the prefix above it is cached already, as when a walk comes to the node."""
    # With that prefix, as section 5.1 defines density, sorting would put the wrong sibling first (docs/planner.md).
    above = cost.saved_s(tree.begin) * (tree.last - tree.first)
    with np.errstate(divide="ignore", invalid="ignore"):
        density = (loads.compute_s - loads.saved_s - above) / loads.memory_s
    return np.where(loads.memory_s > 0, density, np.inf)


def request_loads(tree: PrefixTree, requests: Requests, cost: CostModel) -> tuple[Floats, Floats]:
    """Return seconds of compute and of memory reads by request, in the walk's order; float64 [prompts] each.

    Requests that share a segment pay for it in equal parts, so that the sums equal the root's.
    """
    sharers = np.maximum(tree.last - tree.first, 1)
    saved = cost.saved_s(tree.end - tree.begin, tree.begin) * (sharers - 1) / sharers
    walked = requests.at(tree.order)
    return walked.compute_s(cost) - _above(tree.parent, saved)[tree.leaves], walked.memory_s(cost)


@compiled
def _above(parent: NDArray[np.int64], values: Floats) -> Floats:
    """Return the sum of the values of each node and all nodes above it."""
    sums = values.copy()
    for node in range(1, len(parent)):
        sums[node] += sums[parent[node]]
    return sums


def _between(values: Floats, first: NDArray[np.int64], last: NDArray[np.int64]) -> Floats:
    """Return the sums of values[first:last]."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return sums[last] - sums[first]
