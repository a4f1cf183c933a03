"""Looking at everything that runs, a part in every step, so that estimates live and no step pays for all of them."""

import numpy as np

from engine_ext.compiled import compiled
from engine_ext.plan.groups import ALIKE
from engine_ext.plan.lengths import bucket_of, longest_of, record, refresh
from engine_ext.scan.footprint import add_footprint, generated, rest_of, work_out_holds
from engine_ext.scan.state import (
    AHEAD,
    ALIGNMENT,
    AN_ANSWER,
    BURSTS,
    CAPACITY,
    COMPUTE_LEFT,
    COUNTED,
    FRESH,
    GEMM_S,
    GROUP,
    KNOWN,
    KNOWN_COMPUTE,
    KNOWN_MEMORY,
    KNOWN_OUTPUTS,
    KNOWN_PROMPTS,
    LEFT,
    LEFT_FIRST,
    LEFT_LAST,
    LEFT_WORK,
    LONGEST_ANSWER,
    MEMORY_LEFT,
    NEXT_COMPUTE,
    NEXT_DIRTY,
    NEXT_MEMORY,
    PLANNED,
    PROMPT,
    PROMPTS_LEFT,
    READ_S,
    RIGHT_FIRST,
    RIGHT_LAST,
    RIGHT_SHARE,
    RUNNING,
    SWEEP_AT,
    SWEEPS,
    SWEPT,
    WEIGHTS_S,
    WORK,
    State,
)

NOTHING_S = 1e-9  # seconds of work that count as none: sums of floats do not come back to zero
FIRST_SWEEP = 1  # after the one that counts what waits
DRIFT = 0.05  # of the share that compute has in what remains
SWEEP = 96  # steps in which every running request is looked at once
HEADS = 64  # waiting requests at the left end that stand for the next ones
MOST_COMPUTE = 1.25  # times the reads of a step
ENOUGH = 1.75  # times the shortest sensible step, as compute of a step
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
    prompts, outputs = sums[KNOWN_PROMPTS], sums[KNOWN_OUTPUTS]
    longest = 0.0
    for group in range(len(state.parent)):
        requests, prompt, fresh = state.held_back[group]
        if requests > 0:
            rest, squared = state.rest[group, 0], state.rest_squared[group, 0]
            compute += (fresh + requests * rest) * state.machine[GEMM_S]
            prompts += fresh * state.machine[GEMM_S]
            outputs += requests * rest
            longest = max(longest, rest, min(longest_of(state.stays[group], requests), state.caps[group]))
            memory += (prompt * rest + requests * squared / 2) * state.machine[READ_S]
    sums[COMPUTE_LEFT], sums[MEMORY_LEFT] = compute, memory
    sums[NEXT_COMPUTE], sums[NEXT_MEMORY] = 0.0, 0.0
    sums[PROMPTS_LEFT], sums[AN_ANSWER] = prompts, outputs / max(1, waiting(state))
    sums[LONGEST_ANSWER] = longest
    sums[LEFT_WORK] = _left_work(state)
    sums[RIGHT_SHARE] = _right_share(state)
    if counts[SWEEPS] == FIRST_SWEEP:
        sums[PLANNED] = _compute_share(state)
    counts[SWEEPS] += 1
    counts[SWEEP_AT] = counts[RUNNING]


@compiled
def has_drifted(state: State) -> bool:
    """Whether compute and reads that remain are in another ratio than when the plan was made: estimates were wrong.

    As long as they are right, the pace keeps the ratio.
    """
    return state.counts[SWEEPS] > FIRST_SWEEP and abs(_compute_share(state) - state.sums[PLANNED]) > DRIFT


@compiled
def _compute_share(state: State) -> float:
    compute, memory = state.sums[COMPUTE_LEFT], state.sums[MEMORY_LEFT]
    return compute / max(compute + memory, NOTHING_S)


@compiled
def record_growth(state: State, request: int, tokens: int, ended: bool) -> None:
    group = state.requests[request, GROUP]
    before = int(state.requests[request, COUNTED])
    record(state.entered, state.ended, state.reached, state.parent, group, before, tokens, ended, 1.0)
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
def waiting(state: State) -> int:
    """Requests in both queues."""
    counts = state.counts
    return counts[LEFT_LAST] - counts[LEFT_FIRST] + counts[RIGHT_LAST] - counts[RIGHT_FIRST]


@compiled
def _right_share(state: State) -> float:
    """Of the KV memory, what the right end may have: enough for steps that take longer than reading the weights.

    Not more, although the paper fills the memory: steps that keep the ratio of compute and reads are as good at half of
    it, and the rest takes what answers vary, so that prompts of the left end always find room.
    """
    counts, machine, sums = state.counts, state.machine, state.sums
    if counts[LEFT_FIRST] == counts[LEFT_LAST] or sums[COMPUTE_LEFT] <= NOTHING_S or machine[READ_S] == 0:
        return 1.0
    if machine[BURSTS] > 0:
        return MOST_RIGHT  # each step reads the weights for those that decode alone, so many must
    least_s = max(machine[WEIGHTS_S], ALIGNMENT * machine[GEMM_S])
    reads_s = ENOUGH * least_s * sums[MEMORY_LEFT] / sums[COMPUTE_LEFT]
    return min(MOST_RIGHT, reads_s / (machine[READ_S] * machine[CAPACITY]))


@compiled
def _left_work(state: State) -> float:
    """Work of a prompt token, in tokens of GEMM, of the requests that stand first at the left end."""
    first = state.counts[LEFT_FIRST]
    fresh, work = 1.0, 1.0
    for at in range(first, min(state.counts[LEFT_LAST], first + HEADS)):
        request = state.waiting[LEFT, at]
        fresh += state.requests[request, FRESH]
        work += state.requests[request, WORK]
    return work / fresh


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
        state.leaning,
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
    # Groups below that know little themselves, or are much like it, lean on this one.
    for below in range(group + 1, len(state.parent)):
        if state.parent[below] == group and (state.doubt[below] > DOUBTFUL or state.leaning[below] >= ALIKE):
            state.dirty[below] = True
