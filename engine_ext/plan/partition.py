"""Partitions of equal work and equal density, one per engine replica, and the slices of each (5.5)."""

import itertools
from dataclasses import dataclass

import numpy as np

from engine_ext.arrays import Column, Floats
from engine_ext.errors import InputError


@dataclass(frozen=True, slots=True)
class Slice:
    """The requests `order[first : first + count]`, leased by one worker at a time."""

    first: int
    count: int


def partition(work: Floats, ends: Column, replicas: int) -> tuple[Column, Column]:
    """Cut a blended order for so many replicas: places in the order, replica by replica, and where each begins.

    `work`: float64, seconds by place in the order; `ends` as in Blend. Since every stretch of the order has about the
    window's density, equal work means equal compute and equal memory. Each tier of urgency is cut on its own, so that
    all replicas run the urgent requests first. int64 [requests] and int64 [replicas + 1].
    """
    if replicas < 1:
        raise InputError(f"there must be at least one replica, not {replicas}")
    sums = np.concatenate([[0.0], np.cumsum(work)])
    owner = np.zeros(len(work), dtype=np.int64)
    held = np.zeros(replicas)  # work given to each so far
    for first, last in itertools.pairwise([0, *ends.tolist()]):
        # Each gets what it lacks of its equal part of everything so far, so that rounding does not add up.
        wanted = np.maximum(sums[last] / replicas - held, 0.0)
        goals = sums[first] + np.cumsum(wanted)[:-1] * (sums[last] - sums[first]) / max(float(wanted.sum()), 1e-300)
        cuts = np.maximum.accumulate(first + _nearest(sums[first : last + 1], goals))
        owner[first:last] = np.searchsorted(cuts, np.arange(first, last), side="right")
        held += np.diff(sums[[first, *cuts.tolist(), last]])
    places = np.argsort(owner, kind="stable")
    begins = np.searchsorted(owner[places], np.arange(replicas + 1))
    return places, begins


def cut_slices(requests: int, slice_requests: int) -> tuple[Slice, ...]:
    """Cover [0, requests) by the fewest slices, whose sizes differ by at most one."""
    if slice_requests < 1:
        raise InputError("slice_requests must be at least 1")
    slices = -(-requests // slice_requests)
    edges = np.linspace(0, requests, slices + 1).round().astype(int).tolist()
    return tuple(Slice(first, last - first) for first, last in itertools.pairwise(edges))


def _nearest(sums: Floats, goals: Floats) -> Column:
    """Where the rising sums are nearest to each goal."""
    above = np.clip(np.searchsorted(sums, goals), 1, max(1, len(sums) - 1))
    lower = goals - sums[above - 1] < sums[np.minimum(above, len(sums) - 1)] - goals
    return above - lower
