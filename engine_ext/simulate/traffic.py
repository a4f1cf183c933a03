"""Holds the requests that a simulation of online requests beside a batch gets."""

from dataclasses import dataclass, replace

import numpy as np

from engine_ext.arrays import Column
from engine_ext.plan.prompts import Prompts
from engine_ext.plan.tree import PrefixTree, build_tree
from engine_ext.simulate.arrivals import Arrivals


@dataclass(frozen=True, slots=True)
class Traffic:
    """Online requests, and the requests of a batch that wait from the start; both with prompts and true outputs.

    `everything`: the prefix tree of the batch's requests and the online ones, in this order; `tree`: that of the batch
    alone. `caps`: the batch's max_tokens. `group`: how many of the batch's requests there are at a time, the next when
    all of them have ended; 0 for all at once.
    """

    everything: PrefixTree
    tree: PrefixTree
    lengths: Column
    output: Column
    batch: int
    caps: Column
    arrivals: Arrivals
    group: int = 0

    @classmethod
    def of(cls, prompts: Prompts, output: Column, caps: Column, arrivals: Arrivals, group: int = 0) -> "Traffic":
        """Build the trees. `prompts` and `output` have the batch first, then one for each arrival; `caps` the batch."""
        batch = len(caps)
        end = int(prompts.starts[batch])
        sizes = None if prompts.sizes is None else prompts.sizes[:end]
        alone = Prompts(prompts.tokens[:end], prompts.starts[: batch + 1], sizes)
        return cls(
            build_tree(prompts),
            build_tree(alone),
            prompts.lengths,
            output.astype(np.int64),
            batch,
            caps,
            arrivals,
            group,
        )

    def without_online(self) -> "Traffic":
        """Return the batch alone."""
        nobody = np.zeros(0, dtype=np.int64)
        return replace(
            self,
            everything=self.tree,
            lengths=self.lengths[: self.batch],
            output=self.output[: self.batch],
            arrivals=replace(self.arrivals, arrives_s=np.zeros(0), number=nobody, copy=nobody),
        )
