"""Trims what batches may add to a step while the engine runs: down at once when they make requests late, up slowly.

Limits come from predictions and from a profile, and either may be wrong about today's traffic or machine. What counts
is which online requests have been late because of batches: those that the engine would have served late without them
say nothing. BROS (algorithm 1) halves and doubles a number of requests in the same way; here it is a share of seconds.
"""

from typing import NamedTuple

import numpy as np

from engine_ext.arrays import Floats
from engine_ext.compiled import compiled
from engine_ext.coserve.slo import Bounds

DOWN = 0.5  # what a late request leaves of the trim
UP = 0.1  # by how much of itself the trim grows, while as many requests are in time as may hold one late one
LEAST = 1 / 64  # of the trim
SPARE = 2.0  # late requests that may come together, if enough before them were in time


class Governor(NamedTuple):
    """What is known of the batches' effect on online requests; float64 [1] each.

    `trim`: the share of their part of a step that batches may use, from LEAST to 1. `credit`: how many late requests
    the class still allows. `since_s`: when the trim fell last. `excess_s`: the seconds by which batches have made steps
    longer so far, whether anybody waited or not.
    """

    trim: Floats
    credit: Floats
    since_s: Floats
    excess_s: Floats


class Served(NamedTuple):
    """How an online request was served, in seconds, and how many of these seconds batches took.

    `tpot_s`: per token after the first; 0 if there was none.
    """

    arrived_s: float
    ttft_s: float
    ttft_excess_s: float
    tpot_s: float
    tpot_excess_s: float


def new_governor() -> Governor:
    return Governor(np.ones(1), np.full(1, SPARE), np.full(1, -np.inf), np.zeros(1))


@compiled
def trimmed(governor: Governor, limit_s: float, alone_s: float) -> float:
    """Return the most seconds of a step after the trim; `alone_s`: those that it takes with nothing of the batches."""
    if governor.trim[0] == 1.0:
        return limit_s
    return alone_s + float(governor.trim[0]) * (limit_s - alone_s)


@compiled
def note_step(governor: Governor, took_s: float, alone_s: float) -> None:
    """Note a step that took so many seconds, and would take `alone_s` without the batches."""
    governor.excess_s[0] += max(0.0, took_s - alone_s)


@compiled
def note_served(governor: Governor, bounds: Bounds, percentile: float, served: Served, now_s: float) -> None:
    """Trim by a request that has ended; a late one that came before the last fall does not count against this trim."""
    if served.ttft_s > bounds.ttft_s or served.tpot_s > bounds.tpot_s:
        in_time_alone = served.ttft_s - served.ttft_excess_s <= bounds.ttft_s
        in_time_alone &= served.tpot_s - served.tpot_excess_s <= bounds.tpot_s
        if not in_time_alone or served.arrived_s < governor.since_s[0]:
            return
        governor.credit[0] -= 1.0
        if governor.credit[0] < 0.0:
            governor.credit[0] = 0.0
            governor.trim[0] = max(LEAST, DOWN * governor.trim[0])
            governor.since_s[0] = now_s
        return
    may_be_late = 1.0 - percentile
    governor.credit[0] = min(SPARE, governor.credit[0] + may_be_late / percentile)
    governor.trim[0] = min(1.0, governor.trim[0] * (1.0 + UP * may_be_late))
