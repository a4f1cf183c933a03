"""Which requests go into a window: the earliest deadline first, each project by its weight."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Span:
    """The requests [first, first + count) of a batch that go into the window; the batch ends at `expires_at`.

    `weight`: its project's share of the work, beside other projects that wait.
    """

    batch_id: str
    project_id: str
    weight: float
    index_id: str
    first: int
    count: int
    expires_at: int


def fill(waiting: list[Span], room: int) -> list[Span]:
    """What goes into a window of so many requests: each project has its share, and what one leaves others take."""
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
    """Room by project, at most what it wants, in proportion to its weight among those that want more (max-min)."""
    shares: dict[str, int] = {}
    # Whoever wants least of its share is served first, and leaves the most to the others.
    for project in sorted(wanted, key=lambda each: wanted[each] / weights[each]):
        left = sum(weights[each] for each in wanted if each not in shares)
        free = room - sum(shares.values())
        shares[project] = min(wanted[project], free, math.ceil(free * weights[project] / left))
    return shares


def fitting(spans: Sequence[Span], tokens: Sequence[NDArray[Any]], room: int) -> list[int]:
    """How many requests of each span fit into a window of so many tokens; `tokens` of each, by request.

    Each project's tokens are shared as its requests are, but for one request that it may always have.
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
