"""Blends the two ends of the scan into an order whose every leading part has about the window's density (5.3).

On each side urgent requests come first, and the other side balances them, so the blend is kept. Among the other
requests, no tenant's served work falls behind its share by more than a part of that share.
"""

from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from engine_ext.arrays import Column, Floats
from engine_ext.compiled import compiled
from engine_ext.errors import InputError
from engine_ext.plan.tuning import FAIR_LAG, HASTE, TIERS_PER_DOUBLING

NOT_URGENT = 1 << 30


@dataclass(frozen=True, slots=True)
class Wishes:
    """Holds what requests need besides throughput: deadlines, and a fair share for each tenant.

    `deadline_s` is float64 [requests], seconds from the window's start, infinite for none. `tenant` is int64
    [requests], counted from 0. `weights` is float64 [tenants], each tenant's share of the work while it has requests
    waiting.
    """

    deadline_s: Floats
    tenant: Column
    weights: Floats

    def __post_init__(self) -> None:
        if np.any(np.isnan(self.deadline_s)):
            raise InputError("a deadline must be a number of seconds")
        if not np.all(self.weights > 0):
            raise InputError("the weights of tenants must be above zero")

    @classmethod
    def none(cls, requests: int) -> "Wishes":
        return cls(np.full(requests, np.inf), np.zeros(requests, dtype=np.int64), np.ones(1))


@dataclass(frozen=True, slots=True)
class Blend:
    """Holds a blended order, and the end of the scan that each request was taken from.

    `positions` is int64, places in the scan in order of execution; `right` is bool, whether taken from the right end.
    `ends` is int64, the numbers of requests after which a tier of urgency is complete; the last is the number of all
    requests.
    """

    positions: Column
    right: NDArray[np.bool_]
    ends: Column


def blend(compute_s: Floats, memory_s: Floats, wishes: Wishes, total_s: float, fair_lag: float = FAIR_LAG) -> Blend:
    """Take from the left end while memory reads are ahead, and from the right end while compute is ahead.

    All arrays are in the order of the scan, left to right; `total_s` is the time that the window is expected to take.
    """
    excess = excess_s(compute_s, memory_s)
    meeting = meeting_place(excess)
    tiers = urgency(wishes.deadline_s, total_s)
    left = _by_tier(np.arange(meeting), tiers)
    right = _by_tier(np.arange(len(excess) - 1, meeting - 1, -1), tiers)
    work = 2 * compute_s - excess  # compute, plus memory reads times the window's density
    positions, taken_right = _taken(
        left, right, excess, work, wishes.tenant, wishes.weights, tiers < NOT_URGENT, fair_lag
    )
    return Blend(positions, taken_right, _tier_ends(tiers[positions]))


def excess_s(compute_s: Floats, memory_s: Floats) -> Floats:
    """Return each request's compute beyond what balances its memory reads at the density of all; the sum is zero."""
    reads = float(memory_s.sum())
    return compute_s - (float(compute_s.sum()) / reads if reads else 0.0) * memory_s


def meeting_place(excess: Floats) -> int:
    """Return where the two ends of the scan meet: up to there, the left end has the most compute to spare."""
    # Densities fall from left to right, so the sum peaks about where they pass the root's (section 5.2).
    return int(np.argmax(np.concatenate([[0.0], np.cumsum(excess)])))


def urgency(deadline_s: Floats, total_s: float) -> Column:
    """Return a tier, rising with time, for each deadline that the plain order might miss; NOT_URGENT for the others."""
    with np.errstate(divide="ignore", invalid="ignore"):
        tier = np.floor(TIERS_PER_DOUBLING * np.log2(np.maximum(deadline_s, 1e-3) / max(total_s, 1e-9)))
    return np.where(deadline_s < HASTE * total_s, tier, NOT_URGENT).astype(np.int64)


def _by_tier(positions: Column, tiers: Column) -> Column:
    # A stable sort keeps the scan's order, and with it shared prefixes, inside each tier.
    return positions[np.argsort(tiers[positions], kind="stable")]


def _tier_ends(tiers: Column) -> Column:
    """Return after how many requests each tier is complete, rising; fillers of later tiers may come before."""
    found, last = np.unique(tiers[::-1], return_index=True)
    ends = np.maximum.accumulate(len(tiers) - last)
    return np.unique(np.append(ends, len(tiers))) if len(found) else np.zeros(0, dtype=np.int64)


@compiled
def _taken(
    left: Column,
    right: Column,
    excess: Floats,
    work: Floats,
    tenant: Column,
    weights: Floats,
    urgent: NDArray[np.bool_],
    fair_lag: float,
) -> tuple[Column, NDArray[np.bool_]]:
    """Return positions in order of execution, and whether each came from the right side."""
    total, tenants = len(left) + len(right), len(weights)
    order, from_right = np.empty(total, np.int64), np.zeros(total, np.bool_)
    taken = np.zeros(total, np.bool_)
    # Each side as a whole and tenant by tenant: where a tenant's places start and end, and up to where they are taken.
    sides = (left, right)
    heads = np.zeros(2, np.int64)
    starts_left, own_left = _places_by_tenant(left, tenant, tenants)
    starts_right, own_right = _places_by_tenant(right, tenant, tenants)
    own, stops = (own_left, own_right), (starts_left[1:], starts_right[1:])
    own_heads = np.stack((starts_left[:-1], starts_right[:-1]))
    waiting = stops[0] - own_heads[0] + stops[1] - own_heads[1]
    # Work per weight: what each waiting tenant has got, and what an equal share would be; the tenant with least first.
    served = np.zeros(tenants)
    behind = [(0.0, each) for each in range(tenants)]
    fair, active = 0.0, weights.sum()
    most_behind = fair_lag * work.sum() / active
    ahead = 0.0  # seconds of compute taken beyond balance
    for k in range(total):
        # Section 5.3 keeps the root's density by splitting memory; a plan has none yet and balances seconds.
        side = 1 if ahead > 0 else 0
        heads[side] = _next_free(sides[side], heads[side], len(sides[side]), taken)
        if heads[side] == len(sides[side]):
            side = 1 - side
            heads[side] = _next_free(sides[side], heads[side], len(sides[side]), taken)
        position = sides[side][heads[side]]
        # Deadlines come before fairness (docs/planner.md).
        if tenants > 1 and not urgent[position]:
            while waiting[behind[0][1]] == 0 or served[behind[0][1]] != behind[0][0]:
                heappop(behind)
            late = behind[0][1]
            if fair - served[late] > most_behind:
                for at in (side, 1 - side):
                    own_heads[at, late] = _next_free(own[at], own_heads[at, late], stops[at][late], taken)
                    if own_heads[at, late] < stops[at][late]:
                        position, side = own[at][own_heads[at, late]], at
                        break
        order[k], taken[position], from_right[k] = position, True, side == 1
        ahead += excess[position]
        if tenants > 1:
            whose = tenant[position]
            fair += work[position] / active
            served[whose] += work[position] / weights[whose]
            waiting[whose] -= 1
            if waiting[whose] > 0:
                heappush(behind, (served[whose], whose))  # pyright: ignore[reportArgumentType]
            else:
                active = max(active - weights[whose], 1e-300)
    return order, from_right


@compiled
def _next_free(places: Column, head: int, stop: int, taken: NDArray[np.bool_]) -> int:
    while head < stop and taken[places[head]]:
        head += 1
    return head


@compiled
def _places_by_tenant(side: Column, tenant: Column, tenants: int) -> tuple[Column, Column]:
    """Return where each tenant's places start, and the places of the side, tenant by tenant."""
    starts = np.zeros(tenants + 1, np.int64)
    for position in side:
        starts[tenant[position] + 1] += 1
    starts = np.cumsum(starts)
    places = np.empty(len(side), np.int64)
    free = starts[:-1].copy()
    for position in side:
        places[free[tenant[position]]] = position
        free[tenant[position]] += 1
    return starts, places
