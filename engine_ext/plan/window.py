"""Turns the prompts of a window into its plan: what to expect, the order of execution, partitions and slices."""

import itertools
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine_ext.arrays import Column
from engine_ext.costs.cost import CostModel, Load
from engine_ext.errors import InputError
from engine_ext.plan.blend import Wishes, blend
from engine_ext.plan.groups import Groups, group_requests
from engine_ext.plan.lengths import Estimates, Seen, borrow, estimate, group_caps, look_ahead, see
from engine_ext.plan.memory import Recall
from engine_ext.plan.order import Scan, order_scan, saved_by_order
from engine_ext.plan.partition import Slice, cut_slices, partition
from engine_ext.plan.prompts import Prompts
from engine_ext.plan.resources import Requests, request_loads
from engine_ext.plan.tree import build_tree
from engine_ext.plan.tuning import KEEP_SHARING


@dataclass(frozen=True, slots=True)
class Outputs:
    """Holds what is known of outputs before the plan, in tokens; int64 [prompts] by prompt.

    `caps` is max_tokens. `known` is the true length, or UNKNOWN. `kinds` is equal for requests that are alike in
    something that the prompts do not show, such as their batch. `sampled` lists the requests that have run, and
    `sampled_tokens` the lengths of their answers. `recall`: what earlier batches say of the lengths.
    """

    caps: Column
    known: Column
    kinds: Column | None = None
    sampled: Column = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    sampled_tokens: Column = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    recall: Recall | None = None

    @classmethod
    def of_known(cls, tokens: Column) -> "Outputs":
        return cls(caps=np.maximum(tokens, 1), known=tokens)


@dataclass(frozen=True, slots=True)
class Shape:
    """Says how to lay out the work."""

    replicas: int = 1
    slice_requests: int = 256
    keep_sharing: float = KEEP_SHARING

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise InputError(f"there must be at least one replica, not {self.replicas}")
        if self.slice_requests < 1:
            raise InputError(f"slice_requests must be at least 1, not {self.slice_requests}")


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """Holds what the planner decides about a window. It is advice: no answer depends on it.

    `order` is int64 [prompts], the prompts in order of execution, replica by replica; `partitions` is int64 [replicas +
    1], where each replica's prompts begin. `right` is bool [prompts], by place in the order, whether the request was
    taken from the memory-heavy end. By prompt: `lengths`, int64 [prompts], its tokens; `compute_s` and `memory_s`,
    float64 [prompts], where requests pay for shared prefixes in equal parts. `sharing_kept` is the share of the
    possible sharing that neighbours have at each end of each replica's scan, with deadlines and tenants taken into
    account. `slices` do not cross partitions. With `groups` and `seen`, a scheduler can continue to learn lengths.
    """

    order: Column
    right: NDArray[np.bool_]
    partitions: Column
    slices: tuple[Slice, ...]
    scan: Scan
    estimates: Estimates
    compute_s: NDArray[np.float64]
    memory_s: NDArray[np.float64]
    groups: Groups
    seen: Seen
    lengths: Column
    sharing_kept: float
    prompt_tokens: int
    distinct_tokens: int

    @property
    def load(self) -> Load:
        """Return the work of the window with all the sharing that any order can have."""
        ordered = self.scan.loads.of(0)
        return Load(ordered.compute_s, self.scan.best_saved_s, ordered.memory_s)

    @property
    def density(self) -> NDArray[np.float64]:
        """Return the density of each request; infinite without memory reads; float64 [prompts] by prompt."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.memory_s > 0, self.compute_s / self.memory_s, np.inf)

    @property
    def sharing(self) -> float:
        """Return the share of the prompt tokens that sharing prefixes can save."""
        return 1 - self.distinct_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def plan_window(
    prompts: Prompts, outputs: Outputs, cost: CostModel, wishes: Wishes | None = None, shape: Shape | None = None
) -> WindowPlan:
    """Plan one window: tree, lengths, sort, split, merge, blend, partitions and slices."""
    shape = shape or Shape()
    wishes = wishes or Wishes.none(len(prompts))
    lengths = prompts.lengths
    # One tree for all replicas, cut only after the blend (section 5.5).
    tree = build_tree(prompts)
    groups = group_requests(tree, outputs.kinds)
    ended = np.ones(len(outputs.sampled), dtype=np.bool_)
    asked = outputs.sampled, outputs.sampled_tokens, ended
    seen = see(groups, *asked, borrow(outputs.recall, groups, *asked))
    estimates = estimate(
        groups, look_ahead(seen, groups, group_caps(groups, outputs.caps)), outputs.caps, outputs.known
    )
    requests = Requests(lengths.astype(np.float64), estimates.mean, estimates.squares)

    scan = order_scan(tree, requests, cost, shape.keep_sharing)
    compute_s, memory_s = request_loads(scan.tree, requests, cost)
    by_scan = Wishes(wishes.deadline_s[scan.tree.order], wishes.tenant[scan.tree.order], wishes.weights)
    load = scan.loads.of(0)
    # T_o (section 3.3) is the earliest end of the window, so a deadline near it is urgent.
    blended = blend(compute_s, memory_s, by_scan, load.ideal_s / shape.replicas)
    root = load.density if np.isfinite(load.density) else 0.0
    # At the root's density, compute and reads have equal sums, so that neither outweighs the other (section 5.5).
    places, begins = partition((compute_s + root * memory_s)[blended.positions], blended.ends, shape.replicas)
    by_prompt = np.empty((2, len(prompts)))
    by_prompt[:, scan.tree.order] = compute_s, memory_s
    order, right = scan.tree.order[blended.positions[places]], blended.right[places]
    saved = sum(
        saved_by_order(tree, _line(order[first:last], right[first:last]), cost)
        for first, last in itertools.pairwise(begins.tolist())
    )
    return WindowPlan(
        order=order,
        right=right,
        partitions=begins,
        slices=_slices(begins, shape.slice_requests),
        scan=scan,
        estimates=estimates,
        compute_s=by_prompt[0],
        memory_s=by_prompt[1],
        groups=groups,
        seen=seen,
        lengths=lengths,
        sharing_kept=saved / scan.best_saved_s if scan.best_saved_s else 1.0,
        prompt_tokens=int(lengths.sum()),
        distinct_tokens=tree.distinct_tokens,
    )


def _line(order: Column, right: NDArray[np.bool_]) -> Column:
    """Return a replica's scan from its left end to its right end.

    Both ends reach the meeting point between them at the same time.
    """
    return np.concatenate([order[~right], order[right][::-1]])


def _slices(begins: Column, slice_requests: int) -> tuple[Slice, ...]:
    cut: list[Slice] = []
    for first, last in zip(begins[:-1].tolist(), begins[1:].tolist(), strict=True):
        cut += [Slice(first + each.first, each.count) for each in cut_slices(last - first, slice_requests)]
    return tuple(cut)
