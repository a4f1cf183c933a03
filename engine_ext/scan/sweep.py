"""Sweeps over the running requests, a few in every step: estimates stay current, and no step pays for all requests."""

import numpy as np

from engine_ext.compiled import brief, compiled
from engine_ext.plan.buckets import bucket_of
from engine_ext.plan.lengths import longest_of, record, refresh
from engine_ext.plan.tuning import ALIKE
from engine_ext.scan.footprint import add_footprint, generated, rest_of, work_out_holds
from engine_ext.scan.state import AHEAD, LEFT, RIGHT, State
from engine_ext.scan.tuning import (
    ALIGNMENT,
    DOUBTFUL,
    DRIFT,
    ENOUGH,
    GROUPS_AT_ONCE,
    GROUPS_LOOKED_AT,
    HEADS,
    MOST_IN_BURSTS,
    MOST_RIGHT,
    SWEEP,
)

NOTHING_S = 1e-9  # seconds of work that count as none, because sums of floats do not return to exactly zero
FIRST_SWEEP = 1  # sweep 0 ends before the first step and counts only waiting requests


@compiled
def sweep(state: State) -> None:
    """Look at the next few running requests, from the end of the list backwards.

    The last request takes the place of one that leaves, so a backward sweep misses none.
    """
    totals = state.totals[0]
    _refresh_some(state)
    at = min(totals.sweep_at, totals.running)
    stop = max(0, at - (totals.running // SWEEP + 1))
    while at > stop:
        at -= 1
        request = state.running[at]
        if state.requests[request].swept != totals.sweeps:
            _look_at(state, int(request))
    totals.sweep_at = at
    if at == 0:
        end_sweep(state)


@compiled
def end_sweep(state: State) -> None:
    """Take over what the finished sweep found, and start the next sweep."""
    totals = state.totals[0]
    for k in range(len(AHEAD)):
        now, found = state.footprint[k], state.footprint_next[k]
        now.kv, now.variance, now.right_kv, now.doubt = found.kv, found.variance, found.right_kv, found.doubt
        found.kv, found.variance, found.right_kv, found.doubt = 0.0, 0.0, 0.0, 0.0
    compute, memory = totals.next_compute_s + totals.known_compute_s, totals.next_memory_s + totals.known_memory_s
    prompts, outputs = totals.known_prompts_s, totals.known_outputs
    longest = 0.0
    for group in range(len(state.tree.parent)):
        unknown = state.unknown[group]
        requests, prompt, fresh = unknown.requests, unknown.prompt, unknown.work
        if requests > 0:
            rest, squared = state.outlook.rest[group, 0], state.outlook.rest_squared[group, 0]
            # BlendServe 4.1 in expectation: Comp takes p + d tokens of GEMM, Mem reads p d + d^2 / 2 tokens.
            compute += (fresh + requests * rest) * state.costs.gemm_s
            prompts += fresh * state.costs.gemm_s
            outputs += requests * rest
            longest = max(longest, rest, min(longest_of(state.outlook.stays[group], requests), state.tree.caps[group]))
            memory += (prompt * rest + requests * squared / 2) * state.costs.read_s
    totals.remaining_compute_s, totals.remaining_memory_s = compute, memory
    totals.next_compute_s, totals.next_memory_s = 0.0, 0.0
    totals.remaining_prompts_s, totals.mean_answer = prompts, outputs / max(1, waiting(state))
    totals.longest_answer = longest
    totals.left_work = _left_work(state)
    totals.right_share = right_share(state)
    if totals.sweeps == FIRST_SWEEP:
        totals.planned_share = _compute_share(state)
    totals.sweeps += 1
    totals.sweep_at = totals.running


@compiled
def has_drifted(state: State) -> bool:
    """Return whether the ratio of remaining compute to remaining reads has drifted since the plan was made.

    The pace keeps the ratio as long as the estimates are right, so drift means that they were wrong.
    """
    return state.totals[0].sweeps > FIRST_SWEEP and abs(_compute_share(state) - state.totals[0].planned_share) > DRIFT


@compiled
def _compute_share(state: State) -> float:
    compute, memory = state.totals[0].remaining_compute_s, state.totals[0].remaining_memory_s
    return compute / max(compute + memory, NOTHING_S)


@compiled
def record_growth(state: State, request: int, tokens: int, ended: bool) -> None:
    """Record how far an answer has grown, and mark its group and all groups above it as having news."""
    group = state.requests[request].group
    before = int(state.requests[request].counted)
    record(state.seen, state.tree.parent, group, before, tokens, ended, 1.0)
    while group >= 0:
        state.dirty[group] = True
        group = state.tree.parent[group]


@compiled
def _look_at(state: State, request: int) -> None:
    state.requests[request].swept = state.totals[0].sweeps
    tokens = generated(state, request)
    counted = state.requests[request].counted
    if state.requests[request].known < 0 and bucket_of(tokens) > bucket_of(counted):
        # A running request is a lower bound on its length: ignoring it would make estimates too short.
        record_growth(state, request, tokens, False)
        state.requests[request].counted = tokens
    add_footprint(state, state.footprint_next, request, 1.0)
    rest, squared = rest_of(state, request, tokens)
    state.totals[0].next_compute_s += rest * state.costs.gemm_s
    state.totals[0].next_memory_s += (
        (state.requests[request].prompt + tokens) * rest + squared / 2
    ) * state.costs.read_s


@brief
def waiting(state: State) -> int:
    """Return the number of requests in both queues that may still run."""
    left, right = state.queues[LEFT], state.queues[RIGHT]
    return left.last - left.first + right.last - right.first - state.totals[0].gone


@brief
def right_share(state: State) -> float:
    """Return the share of the KV memory for the right end: all of it once the left queue is empty.

    Where a prefill stops decoding it is MOST_IN_BURSTS. Else it is enough for steps longer than reading the weights,
    and no more, although the paper fills the memory (BlendServe 5.3): steps that keep the ratio of compute to reads are
    as good at half of it. The rest absorbs the variation in answers, so that prompts of the left end always find room.
    """
    totals, costs = state.totals[0], state.costs
    if (
        state.queues[LEFT].first == state.queues[LEFT].last
        or totals.remaining_compute_s <= NOTHING_S
        or costs.read_s == 0
    ):
        return 1.0
    if costs.bursts:
        return MOST_IN_BURSTS
    # A shorter step would still read all the weights, or compute a whole GEMM tile (A.2).
    least_s = max(costs.weights_s, ALIGNMENT * costs.gemm_s)
    reads_s = ENOUGH * least_s * totals.remaining_memory_s / totals.remaining_compute_s
    return min(MOST_RIGHT, reads_s / (costs.read_s * costs.capacity))


@compiled
def _left_work(state: State) -> float:
    """Return the work per prompt token, in tokens of GEMM, of the requests that are next at the left end."""
    first = state.queues[LEFT].first
    fresh, work = 1.0, 1.0
    for at in range(first, min(state.queues[LEFT].last, first + HEADS)):
        request = state.waiting[LEFT, at]
        fresh += state.requests[request].fresh
        work += state.requests[request].work
    return work / fresh


@compiled
def _refresh_some(state: State) -> None:
    """Update the outlook of the next few groups that have news."""
    left = GROUPS_AT_ONCE
    for _ in range(min(GROUPS_LOOKED_AT, len(state.tree.parent))):
        group = state.totals[0].next_dirty
        state.totals[0].next_dirty = (group + 1) % len(state.tree.parent)
        if state.dirty[group]:
            refresh_group(state, group)
            left -= 1
            if left == 0:
                break


@compiled
def refresh_group(state: State, group: int) -> None:
    """Update a group's outlook, and mark the groups below that depend on it."""
    state.dirty[group] = False
    refresh(group, state.tree, state.seen, state.outlook)
    work_out_holds(state, group)
    state.doubt[group] = 1 / np.sqrt(1 + np.sum(state.seen.ended[group]))
    # Groups below that know little themselves, or resemble this one, lean on it.
    for below in range(group + 1, len(state.tree.parent)):
        if state.tree.parent[below] == group and (state.doubt[below] > DOUBTFUL or state.tree.leaning[below] >= ALIKE):
            state.dirty[below] = True
