"""The resource-aware prefix tree: what the requests below each node cost, and how dense they are (section 5.1)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine_ext.plan.cost import CostModel, Load
from engine_ext.plan.tree import PrefixTree

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class NodeLoads:
    """Seconds by node of a tree, each over all requests below it; float64 [nodes].

    `saved_s` is the compute that sharing prefixes inside the node's subtree saves; what the node shares with others
    above it counts further up.
    """

    compute_s: Floats
    saved_s: Floats
    memory_s: Floats

    @property
    def density(self) -> Floats:
        """rho = (1 - s) T_comp / T_mem by node; infinite where nothing is read."""
        with np.errstate(divide="ignore", invalid="ignore"):
            density = (self.compute_s - self.saved_s) / self.memory_s
        return np.where(self.memory_s > 0, density, np.inf)

    def of(self, node: int) -> Load:
        return Load(float(self.compute_s[node]), float(self.saved_s[node]), float(self.memory_s[node]))


def node_loads(tree: PrefixTree, prompt_tokens: Floats, output_tokens: Floats, cost: CostModel) -> NodeLoads:
    """Loads of every node; lengths are float64 [requests] in the order of the prompts, not of the tree."""
    p, d = prompt_tokens[tree.order], output_tokens[tree.order]
    # All prompts below a node have its segment in common, and one computes it.
    sharing = cost.saved_s(tree.end - tree.begin, tree.begin) * np.maximum(tree.last - tree.first - 1, 0)
    return NodeLoads(
        compute_s=_between(cost.compute_s(p, d), tree.first, tree.last),
        saved_s=_between(sharing, np.arange(len(tree)), tree.after),
        memory_s=_between(cost.memory_s(p, d), tree.first, tree.last),
    )


def _between(values: Floats, first: NDArray[np.int64], last: NDArray[np.int64]) -> Floats:
    """Sums of values[first:last]."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return sums[last] - sums[first]
