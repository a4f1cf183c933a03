"""Looking at everything that runs, a part in every step, so that estimates live and no step pays for all of them."""

import numpy as np

from engine_ext.plan.compiled import compiled
from engine_ext.plan.footprint import add_footprint, generated, rest_of, work_out_holds
from engine_ext.plan.lengths import bucket_of, record, refresh
from engine_ext.plan.scan_state import (
    AHEAD,
    COMPUTE_LEFT,
    COUNTED,
    FRESH,
    GEMM_S,
    GROUP,
    KNOWN,
    KNOWN_COMPUTE,
    KNOWN_MEMORY,
    LEFT,
    LEFT_FIRST,
    LEFT_LAST,
    LEFT_WORK,
    MEMORY_LEFT,
    NEXT_COMPUTE,
    NEXT_DIRTY,
    NEXT_MEMORY,
    PROMPT,
    READ_S,
    RIGHT,
    RIGHT_FIRST,
    RIGHT_LAST,
    RIGHT_SHARE,
    RUNNING,
    SWEEP_AT,
    SWEEPS,
    SWEPT,
    WORK,
    State,
)

NOTHING_S = 1e-9  # seconds of work that count as none: sums of floats do not come back to zero
SWEEP = 96  # steps in which every running request is looked at once
HEADS = 64  # waiting requests at each end whose density stands for the end's
MOST_RIGHT = 0.8  # of the KV memory: prompts of the left side come in lumps, and a cache that is full retracts
DOUBTFUL = 0.3  # of a group that has seen about ten answers
GROUPS_AT_ONCE = 1  # groups whose outlook is worked out again in one step
GROUPS_LOOKED_AT = 64  # groups asked for news in one step


@compiled
def sweep(state: State) -> None:
    """Look at the next few of what runs, from the end of the list: what leaves moves the last into its place."""
    counts = state.counts
    _refresh_some(state)
    at = min(counts[SWEEP_AT], counts[RUNNING])
    stop = max(0, at - (counts[RUNNING] // SWEEP + 1))
    while at > stop:
        at -= 1
        request = state.running[at]
        if state.requests[request, SWEPT] != counts[SWEEPS]:
            _look_at(state, int(request))
    counts[SWEEP_AT] = at
    if at == 0:
        end_sweep(state)


@compiled
def end_sweep(state: State) -> None:
    """Every running request has been looked at: take over what was found, and begin again."""
    counts, sums = state.counts, state.sums
    for k in range(len(AHEAD)):
        for row in range(4):
            state.footprint[k, row] = state.footprint_next[k, row]
            state.footprint_next[k, row] = 0.0
    compute, memory = sums[NEXT_COMPUTE] + sums[KNOWN_COMPUTE], sums[NEXT_MEMORY] + sums[KNOWN_MEMORY]
    for group in range(len(state.parent)):
        requests, prompt, fresh = state.held_back[group]
        if requests > 0:
            rest, squared = state.rest[group, 0], state.rest_squared[group, 0]
            compute += (fresh + requests * rest) * state.machine[GEMM_S]
            memory += (prompt * rest + requests * squared / 2) * state.machine[READ_S]
    sums[COMPUTE_LEFT], sums[MEMORY_LEFT] = compute, memory
    sums[NEXT_COMPUTE], sums[NEXT_MEMORY] = 0.0, 0.0
    sums[RIGHT_SHARE] = _right_share(state)
    counts[SWEEPS] += 1
    counts[SWEEP_AT] = counts[RUNNING]


@compiled
def record_growth(state: State, request: int, tokens: int, ended: bool) -> None:
    group = state.requests[request, GROUP]
    record(
        state.entered, state.ended, state.reached, state.parent, group, state.requests[request, COUNTED], tokens, ended
    )
    while group >= 0:
        state.dirty[group] = True
        group = state.parent[group]


@compiled
def _look_at(state: State, request: int) -> None:
    state.requests[request, SWEPT] = state.counts[SWEEPS]
    tokens = generated(state, request)
    counted = state.requests[request, COUNTED]
    if state.requests[request, KNOWN] < 0 and bucket_of(tokens) > bucket_of(counted):
        record_growth(state, request, tokens, False)
        state.requests[request, COUNTED] = tokens
    add_footprint(state, state.footprint_next, request, 1.0)
    rest, squared = rest_of(state, request, tokens)
    state.sums[NEXT_COMPUTE] += rest * state.machine[GEMM_S]
    state.sums[NEXT_MEMORY] += ((state.requests[request, PROMPT] + tokens) * rest + squared / 2) * state.machine[READ_S]


@compiled
def _right_share(state: State) -> float:
    """M_R / M: the KV memory that the right end may have, so that both ends together have the density that remains."""
    left, right = _head_density(state, LEFT), _head_density(state, RIGHT)
    if state.sums[MEMORY_LEFT] <= NOTHING_S:
        return 1.0
    root = state.sums[COMPUTE_LEFT] / state.sums[MEMORY_LEFT]
    if left <= root or right >= root:
        return 1.0
    if left == np.inf:
        return MOST_RIGHT
    return min((left - root) / (left - right), MOST_RIGHT)


@compiled
def _head_density(state: State, side: int) -> float:
    """Density of the requests that stand first at this end; for the left one also its work per prompt token."""
    counts = state.counts
    first = counts[LEFT_FIRST] if side == LEFT else counts[RIGHT_FIRST]
    last = counts[LEFT_LAST] if side == LEFT else counts[RIGHT_LAST]
    compute, memory, fresh, work = 0.0, 0.0, 1.0, 1.0
    for at in range(first, min(last, first + HEADS)):
        request = state.waiting[side, at]
        fresh += state.requests[request, FRESH]
        work += state.requests[request, WORK]
        rest, squared = rest_of(state, request, state.requests[request, COUNTED])
        compute += (state.requests[request, WORK] + rest) * state.machine[GEMM_S]
        memory += (state.requests[request, PROMPT] * rest + squared / 2) * state.machine[READ_S]
    if side == LEFT:
        state.sums[LEFT_WORK] = work / fresh
    if memory > 0:
        return compute / memory
    return np.inf if side == LEFT else 0.0


@compiled
def _refresh_some(state: State) -> None:
    """Work out the outlook of the next few groups that have news."""
    left = GROUPS_AT_ONCE
    for _ in range(min(GROUPS_LOOKED_AT, len(state.parent))):
        group = state.counts[NEXT_DIRTY]
        state.counts[NEXT_DIRTY] = (group + 1) % len(state.parent)
        if state.dirty[group]:
            refresh_group(state, group)
            left -= 1
            if left == 0:
                break


@compiled
def refresh_group(state: State, group: int) -> None:
    state.dirty[group] = False
    refresh(
        group,
        state.parent,
        state.caps,
        state.entered,
        state.ended,
        state.reached,
        state.hazard,
        state.where,
        state.stays,
        state.rest,
        state.rest_squared,
    )
    work_out_holds(state, group)
    state.doubt[group] = 1 / np.sqrt(1 + np.sum(state.ended[group]))
    # Groups below that know little themselves lean on this one.
    for below in range(group + 1, len(state.parent)):
        if state.parent[below] == group and state.doubt[below] > DOUBTFUL:
            state.dirty[below] = True
