"""Builds the two ends of a scan: the requests of each end in order, and the tokens that each request must compute."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine_ext.arrays import Column, Floats
from engine_ext.costs.cost import CostModel
from engine_ext.plan.blend import excess_s, meeting_place
from engine_ext.plan.order import common_in, order_scan
from engine_ext.plan.resources import Requests, request_loads
from engine_ext.plan.tree import PrefixTree
from engine_ext.plan.tuning import KEEP_SHARING
from engine_ext.scan.tiers import Urgency


@dataclass(frozen=True, slots=True)
class Ends:
    """The requests of each end, in the order in which it admits them.

    `fresh`: int64 [prompts], prompt tokens that a request does not share with the one before it at its end. `tier`:
    int64 [prompts], the requests' tiers of urgency, in whose order both ends are. `total_s`: the work of all of them.
    """

    left: Column
    right: Column
    fresh: Column
    tier: Column
    total_s: float


def two_ends(
    tree: PrefixTree,
    requests: Requests,
    cost: CostModel,
    first: Column,
    waits: NDArray[np.bool_] | None = None,
    keep: float = KEEP_SHARING,
    urgency: Urgency | None = None,
) -> Ends:
    """Sort the tree, split it into two ends where compute and memory balance, and let what is urgent go first at each.

    `first`: requests that come before all others of their tier, in this order. `waits`: bool [prompts], the requests to
    put into the ends; the others only inform the order.
    """
    scan = order_scan(tree, requests, cost, keep)
    compute, memory = request_loads(scan.tree, requests, cost)
    places = _mixed(scan.tree, compute, memory)
    if waits is not None:
        places = places[waits[scan.tree.order[places]]]
    order = scan.tree.order[places]
    meeting = meeting_place(excess_s(compute[places], memory[places]))
    total_s = float(max(compute[places].sum(), memory[places].sum()))
    tier = (urgency or Urgency.none(len(scan.tree.order))).tiers(total_s, waits)
    # Stable, so that inside a tier each end keeps its order, and with it shared prefixes.
    by_tier = np.argsort(tier[order[:meeting]], kind="stable"), np.argsort(tier[order[meeting:]][::-1], kind="stable")
    places = np.concatenate([places[:meeting][by_tier[0]], places[meeting:][::-1][by_tier[1]][::-1]])
    order = scan.tree.order[places]
    asked = np.isin(order, first)
    left = np.concatenate([first, order[:meeting][~asked[:meeting]]])
    left = left[np.argsort(tier[left], kind="stable")]
    right = order[meeting:][::-1][~asked[meeting:][::-1]]
    fresh = fresh_tokens(scan.tree, requests.prompt.astype(np.int64), places, meeting)
    return Ends(left, right, fresh, tier, total_s)


def _mixed(tree: PrefixTree, compute: Floats, memory: Floats) -> Column:
    """Return the places of the walk, with siblings of about the same density in the order in which their prompts came.

    If they were sorted to the last token, answers of one length would be admitted together and end together, and the KV
    memory would fill and empty in waves.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        octave = np.floor(np.log2(compute / memory))
    parent = tree.parent[tree.leaves]
    begins = (parent[1:] != parent[:-1]) | (octave[1:] != octave[:-1])
    return np.lexsort((tree.order, np.concatenate([[0], np.cumsum(begins)])[: len(parent)]))


def fresh_tokens(tree: PrefixTree, lengths: Column, places: Column, meeting: int) -> Column:
    """Return the prompt tokens that each request does not share with the one before it at its end of the scan.

    Of the leaves at `places` of the walk, the left end takes the first `meeting` from left to right, and the right end
    takes the others from right to left; siblings may be in any order. The result is int64 [prompts] by request, like
    `lengths`, with 0 for requests that have no place.
    """
    fresh = np.zeros(len(lengths), dtype=np.int64)
    if len(places) == 0:
        return fresh
    between = common_in(tree.parent, tree.end, tree.leaves[places])[1:]
    common = np.concatenate([[0], between, [0]])
    shared = np.where(np.arange(len(places)) < meeting, common[:-1], common[1:])
    requests = tree.order[places]
    fresh[requests] = lengths[requests] - shared
    return fresh
