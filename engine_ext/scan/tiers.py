"""Sorts waiting requests into tiers of urgency, by their deadlines and by who has overtaken them.

A lower tier goes first at both ends of the scan. Inside a tier the scan blends as if there were no deadlines.
"""

from typing import NamedTuple

import numpy as np

from engine_ext.arrays import Bools, Column, Floats
from engine_ext.plan.pools import POOLS_S
from engine_ext.plan.tuning import HASTE, TIERS_PER_DOUBLING
from engine_ext.scan.projects import NOT_AHEAD

POOLS, POOL = 1000, 10  # the first pool's tier, and from one pool's to the next one's; threatened deadlines come before
AGED = POOLS + POOL // 2  # who was overtaken too often goes behind what must end in minutes, and before all others
ORDINARY = POOLS + POOL * len(POOLS_S)
SHORTEST_S = 1e-3  # deadlines that are nearer count as this near


class Urgency(NamedTuple):
    """What each request needs besides throughput.

    `due_s`: float64 [requests], seconds from now until it must have ended; infinite for none. `aged`: bool [requests],
    whether too many requests that came later have gone before it. `slowness`: seconds that the engine takes for a
    second of the cost model. `apart`: int64 [requests], 1 for those that go behind the others of their urgency.
    `ahead`: int64 [requests], the project of those whose project had more than its share (projects.py), otherwise
    NOT_AHEAD.
    """

    due_s: Floats
    aged: Bools
    slowness: float = 1.0
    apart: Column | int = 0
    ahead: Column | None = None

    @classmethod
    def none(cls, requests: int) -> "Urgency":
        return cls(np.full(requests, np.inf), np.zeros(requests, dtype=np.bool_))

    def tiers(self, total_s: float, waits: Bools | None = None) -> Column:
        """Return each request's tier; `total_s` is the work of all requests that wait, by the cost model.

        A deadline that the order without tiers might miss counts to a quarter of an octave, so that such deadlines are
        met about in their order. Others count by pools, as in the service's queue. A deadline that has passed cannot be
        met, and hurries nobody.
        """
        due_s = np.where(self.due_s > 0, self.due_s, np.inf)
        pools = POOLS + POOL * np.searchsorted(np.array(POOLS_S), due_s)
        tiers = np.where(self.aged, np.minimum(pools, AGED), pools)
        with np.errstate(invalid="ignore"):
            near = np.floor(TIERS_PER_DOUBLING * np.log2(np.clip(due_s, SHORTEST_S, 1e12)))
        tiers = np.where(due_s < HASTE * self.slowness * total_s, near, tiers + self.apart).astype(np.int64)
        if self.ahead is None or (self.ahead == NOT_AHEAD).all():
            return tiers
        # What is most urgent of a project that is ahead goes beside what is least urgent of the others, and the rest of
        # it behind, in its order: their deadlines order a project's own requests all the same.
        here = np.ones(len(tiers), dtype=np.bool_) if waits is None else waits
        last = tiers[here & (self.ahead == NOT_AHEAD)].max(initial=0)
        for project in np.unique(self.ahead[here & (self.ahead != NOT_AHEAD)]).tolist():
            mine = self.ahead == project
            tiers[mine] += max(0, int(last - tiers[mine & here].min()))
        return tiers

    def look_again_s(self, total_s: float, waits: Bools) -> float:
        """Return the seconds after which a deadline of a waiting request may be threatened that is not yet.

        That is so if the work has not shrunk by then.
        """
        spare = self.due_s[waits] - HASTE * self.slowness * total_s
        spare = spare[spare > 0]
        return max(float(spare.min()), self.slowness * total_s / 100) if len(spare) else np.inf
