"""Cuts a plan into partitions of equal work and density, one per engine replica, and these into slices (5.5)."""

import itertools
from dataclasses import dataclass

import numpy as np

from engine_ext.arrays import Column, Floats
from engine_ext.errors import InputError


@dataclass(frozen=True, slots=True)
class Slice:
    """The requests `order[first : first + count]`, which one worker leases at a time."""

    first: int
    count: int


def partition(work: Floats, ends: Column, replicas: int) -> tuple[Column, Column]:
    """Cut a blended order into one part per replica.

    `work` is float64, seconds by place in the order; `ends` is as in Blend. Every part of the order has about the
    window's density, so equal work means equal compute and equal memory reads. Each tier of urgency is cut on its own,
    so that all replicas run the urgent requests first. Returns int64 [requests], the places in the order, replica by
    replica, and int64 [replicas + 1], where each replica's places begin.
    """
    if replicas < 1:
        raise InputError(f"there must be at least one replica, not {replicas}")
    sums = np.concatenate([[0.0], np.cumsum(work)])
    owner = np.zeros(len(work), dtype=np.int64)
    given = np.zeros(replicas)  # work of each so far
    for first, last in itertools.pairwise([0, *ends.tolist()]):
        # Each replica gets what it lacks of an equal part of all work so far, so that rounding does not add up.
        wanted = np.maximum(sums[last] / replicas - given, 0.0)
        goals = sums[first] + np.cumsum(wanted)[:-1] * (sums[last] - sums[first]) / max(float(wanted.sum()), 1e-300)
        cuts = np.maximum.accumulate(first + _nearest(sums[first : last + 1], goals))
        # Parts lose sharing only along the paths where they are cut, which is negligible (section 5.5).
        owner[first:last] = np.searchsorted(cuts, np.arange(first, last), side="right")
        given += np.diff(sums[[first, *cuts.tolist(), last]])
    places = np.argsort(owner, kind="stable")
    begins = np.searchsorted(owner[places], np.arange(replicas + 1))
    return places, begins


def cut_slices(requests: int, slice_requests: int) -> tuple[Slice, ...]:
    """Cover [0, requests) with the fewest slices of at most `slice_requests`; their sizes differ by at most one."""
    if slice_requests < 1:
        raise InputError("slice_requests must be at least 1")
    slices = -(-requests // slice_requests)
    edges = np.linspace(0, requests, slices + 1).round().astype(int).tolist()
    return tuple(Slice(first, last - first) for first, last in itertools.pairwise(edges))


def _nearest(sums: Floats, goals: Floats) -> Column:
    """Return where the rising sums are nearest to each goal."""
    above = np.clip(np.searchsorted(sums, goals), 1, max(1, len(sums) - 1))
    lower = goals - sums[above - 1] < sums[np.minimum(above, len(sums) - 1)] - goals
    return above - lower
