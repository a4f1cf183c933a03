"""From the prompts of a window to its plan: the order of execution and the slices that workers lease."""

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine_ext.plan.prompts import Prompts
from engine_ext.plan.tree import build_tree


@dataclass(frozen=True, slots=True)
class Slice:
    """The requests `order[first : first + count]`, leased by one worker at a time."""

    first: int
    count: int


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """What the planner decides about a window. It is advice: no answer depends on it.

    `order`: int64 [prompts], a permutation. `sharing`: share of prompt tokens that sharing prefixes saves.
    """

    order: NDArray[np.int64]
    slices: tuple[Slice, ...]
    prompt_tokens: int
    sharing: float


def plan_window(prompts: Prompts, slice_requests: int) -> WindowPlan:
    """Depth-first order of the prefix tree, cut into slices of at most `slice_requests` requests of about equal number.

    Raises ValueError when `slice_requests` is not positive.
    """
    if slice_requests < 1:
        raise ValueError("slice_requests must be at least 1")
    tree = build_tree(prompts)
    tokens = len(prompts.tokens)
    return WindowPlan(
        order=tree.order,
        slices=cut_slices(len(prompts), slice_requests),
        prompt_tokens=tokens,
        sharing=1 - tree.distinct_tokens / tokens if tokens else 0.0,
    )


def cut_slices(requests: int, slice_requests: int) -> tuple[Slice, ...]:
    """Cover [0, requests) by the fewest slices, whose sizes differ by at most one."""
    slices = -(-requests // slice_requests)
    edges = np.linspace(0, requests, slices + 1).round().astype(int).tolist()
    return tuple(Slice(first, last - first) for first, last in itertools.pairwise(edges))
