"""Chooses the requests of a window: earliest deadline first, with room shared among projects by weight."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Span:
    """The requests [first, first + count) of a batch that go into the window; the batch expires at `expires_at`.

    `weight`: its project's share of the work, relative to other waiting projects. `again`: int64 [requests], numbers of
    requests that were planned before, and are planned again.
    """

    batch_id: str
    project_id: str
    weight: float
    index_id: str
    first: int
    count: int
    expires_at: int
    again: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64), compare=False)


def fill(waiting: list[Span], room: int) -> list[Span]:
    """Choose at most `room` requests for a window. Each project gets its share; others take what it leaves."""
    wanted: Counter[str] = Counter()
    for span in waiting:
        wanted[span.project_id] += span.count
    shares = shared_room(wanted, {span.project_id: span.weight for span in waiting}, room)
    chosen: list[Span] = []
    for span in waiting:
        count = min(span.count, shares[span.project_id])
        if count:
            chosen.append(replace(span, count=count))
            shares[span.project_id] -= count
    return chosen


def shared_room(wanted: Mapping[str, int], weights: Mapping[str, float], room: int) -> dict[str, int]:
    """Share room among projects by weight (max-min fairness). No project gets more than it wants."""
    shares: dict[str, int] = {}
    # The project that wants the least relative to its weight comes first, and leaves the most to the others.
    for project in sorted(wanted, key=lambda each: wanted[each] / weights[each]):
        left = sum(weights[each] for each in wanted if each not in shares)
        free = room - sum(shares.values())
        shares[project] = min(wanted[project], free, math.ceil(free * weights[project] / left))
    return shares


def fitting(spans: Sequence[Span], tokens: Sequence[NDArray[Any]], room: int) -> list[int]:
    """Return how many requests of each span fit into a window of `room` tokens; `tokens`: by span, of each request.

    Projects share tokens as they share requests, except that each may always have one request.
    """
    wanted: Counter[str] = Counter()
    for span, each in zip(spans, tokens, strict=True):
        wanted[span.project_id] += int(each.sum(dtype=np.int64))
    shares = shared_room(wanted, {span.project_id: span.weight for span in spans}, room)
    counts, begun, full = list[int](), set[str](), set[str]()
    for span, each in zip(spans, tokens, strict=True):
        project, count = span.project_id, 0
        if project not in full:
            ends = np.cumsum(each, dtype=np.int64)
            count = int(np.searchsorted(ends, shares[project], side="right"))
            count = count if project in begun else max(count, 1)
            shares[project] -= int(ends[count - 1]) if count else 0
            begun.add(project)
            if count < span.count:
                full.add(project)
        counts.append(count)
    return counts
