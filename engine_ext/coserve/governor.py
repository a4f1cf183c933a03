"""Cuts the batches' share of a step when they make online requests late: by half at once, and back up slowly.

Limits come from predictions and from what was profiled, and either may be wrong about today's traffic or machine. A
request counts only if batches made it late; one that would have been late anyway says nothing. BROS (algorithm 1)
halves and doubles a number of requests in the same way; here it is a share of seconds.
"""

from typing import NamedTuple

import numpy as np

from engine_ext.arrays import Floats
from engine_ext.compiled import compiled
from engine_ext.coserve.slo import Bounds
from engine_ext.coserve.tuning import CUT, LEAST_OF_LIMIT, RISE, SPARE


class Governor(NamedTuple):
    """Holds what the governor knows of the batches' effect on online requests; each field is float64 [1].

    `share`: the share of their part of a step that batches may use, from LEAST_OF_LIMIT to 1. `credit`: how many more
    requests may be late before the next cut. `cut_at_s`: when the last cut was. `excess_s`: the seconds by which
    batches have made steps longer so far, whether or not anybody waited.
    """

    share: Floats
    credit: Floats
    cut_at_s: Floats
    excess_s: Floats


class Moment(NamedTuple):
    """Holds a time in an online request's life, and the governor's `excess_s` then."""

    at_s: float
    excess_s: float


class Served(NamedTuple):
    """Says how long an online request took, and how many of these seconds batches caused (`excess`).

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
def governed(governor: Governor, limit_s: float, alone_s: float) -> float:
    """Return the most seconds of a step if batches use only their share; the online work alone takes `alone_s`."""
    if governor.share[0] == 1.0 or limit_s <= alone_s:
        return limit_s
    return alone_s + float(governor.share[0]) * (limit_s - alone_s)


@compiled
def note_step(governor: Governor, took_s: float, alone_s: float, whole_s: float) -> None:
    """Note a step that took `took_s`; it was expected to take `whole_s`, and `alone_s` without the batches' part.

    What it took longer than expected is divided between both in the same ratio.
    """
    if whole_s > alone_s:
        governor.excess_s[0] += took_s * (1.0 - alone_s / whole_s)


@compiled
def served(arrived: Moment, first: Moment, last: Moment, generated: int) -> Served:
    """Return how a request of `generated` tokens was served, from its arrival, its first token and its last one."""
    after = max(1, generated - 1)
    return Served(
        arrived.at_s,
        first.at_s - arrived.at_s,
        first.excess_s - arrived.excess_s,
        (last.at_s - first.at_s) / after,
        (last.excess_s - first.excess_s) / after,
    )


@compiled
def is_late(bounds: Bounds, ttft_s: float, tpot_s: float) -> bool:
    """Return whether a request missed its TTFT or its TPOT."""
    return ttft_s > bounds.ttft_s or tpot_s > bounds.tpot_s


@compiled
def note_served(governor: Governor, bounds: Bounds, percentile: float, found: Served, now_s: float) -> None:
    """Adjust the batches' share after an online request has ended.

    A late request counts only if it would have been in time without the batches, and only if it arrived after the last
    cut: earlier ones ran in part under the larger share. The longest gap between two tokens is not looked at: one long
    step would make all requests in it late.
    """
    may_be_late = 1.0 - percentile
    if not is_late(bounds, found.ttft_s, found.tpot_s):
        governor.credit[0] = min(SPARE, governor.credit[0] + may_be_late / percentile)
        governor.share[0] = min(1.0, governor.share[0] * (1.0 + RISE * may_be_late))
        return
    if is_late(bounds, found.ttft_s - found.ttft_excess_s, found.tpot_s - found.tpot_excess_s):
        return
    if found.arrived_s < governor.cut_at_s[0]:
        return
    if governor.credit[0] >= 1.0:
        governor.credit[0] -= 1.0
        return
    governor.credit[0] = 0.0
    governor.share[0] = max(LEAST_OF_LIMIT, CUT * governor.share[0])
    governor.cut_at_s[0] = now_s
