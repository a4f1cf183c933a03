"""Keeps the schedulers of one tensor-parallel engine in step: one clock for all, and one decision in each step.

Each rank of such an engine runs a scheduler of its own, and all must run the same batch, or their collectives hang or
mix up different requests. The scan decides by the same events in the same order everywhere, and this checks it.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from torch import distributed

from engine_ext.errors import RanksDiverged
from engine_ext.plugin.scheduler import emulated

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Ranks:
    """The ranks that run the same requests. Only the first reads a clock, and the others take over its time.

    `group`: their gloo group, or None for an engine of one rank.
    """

    group: Any
    is_first: bool = True
    clock: Callable[[], float] = time.monotonic
    now: float = 0.0
    are_ready: bool = True

    @classmethod
    def of(cls, scheduler: Any) -> "Ranks":
        group, clock = scheduler.dp_tp_group, emulated.clock() or time.monotonic
        if group.world_size == 1:
            return cls(None, clock=clock, now=clock())
        return cls(group.cpu_group, group.is_first_rank, clock)

    def tick(self) -> float:
        """Return the time now or, where several ranks must agree on it, the time of the last step."""
        if self.group is None:
            self.now = self.clock()
        return self.now

    def agree(self, budget: int, yields: bool, admitted: Sequence[str], is_ready: bool = True) -> None:
        """Compare a step's decision with that of all other ranks, and take over the first rank's time as `now`.

        `is_ready`: whether this rank could follow another plan; `are_ready` then says whether all could. Raises
        RanksDiverged in every rank if two of them decided differently: better no step than a wrong one.
        """
        if self.group is None:
            self.now = self.clock()
            return
        digest = crc32("\0".join((str(budget), str(yields), *admitted)).encode())
        microseconds = int(self.clock() * 1e6) if self.is_first else 0
        # One collective: the greatest digest, the least one (negated), the only time, and whether any is not ready.
        found = torch.tensor([digest, -digest, microseconds, int(not is_ready)])
        distributed.all_reduce(found, distributed.ReduceOp.MAX, self.group)
        greatest, least, now, some_are_not = found.tolist()
        if greatest != -least:
            log.error("the ranks of this engine decided differently and cannot continue; budget %d", budget)
            raise RanksDiverged(len(admitted), budget)
        self.now, self.are_ready = now / 1e6, not some_are_not
