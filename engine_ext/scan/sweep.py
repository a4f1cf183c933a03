"""Looking at everything that runs, a part in every step, so that estimates live and no step pays for all of them."""

import numpy as np

from engine_ext.compiled import compiled
from engine_ext.plan.groups import ALIKE
from engine_ext.plan.lengths import bucket_of, longest_of, record, refresh
from engine_ext.scan.footprint import add_footprint, generated, rest_of, work_out_holds
from engine_ext.scan.state import AHEAD, ALIGNMENT, LEFT, RIGHT, State

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
    totals = state.totals
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
    """Every running request has been looked at: take over what was found, and begin again."""
    totals = state.totals
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
    totals.right_share = _right_share(state)
    if totals.sweeps == FIRST_SWEEP:
        totals.planned_share = _compute_share(state)
    totals.sweeps += 1
    totals.sweep_at = totals.running


@compiled
def has_drifted(state: State) -> bool:
    """Whether compute and reads that remain are in another ratio than when the plan was made: estimates were wrong.

    As long as they are right, the pace keeps the ratio.
    """
    return state.totals.sweeps > FIRST_SWEEP and abs(_compute_share(state) - state.totals.planned_share) > DRIFT


@compiled
def _compute_share(state: State) -> float:
    compute, memory = state.totals.remaining_compute_s, state.totals.remaining_memory_s
    return compute / max(compute + memory, NOTHING_S)


@compiled
def record_growth(state: State, request: int, tokens: int, ended: bool) -> None:
    group = state.requests[request].group
    before = int(state.requests[request].counted)
    record(state.seen, state.tree.parent, group, before, tokens, ended, 1.0)
    while group >= 0:
        state.dirty[group] = True
        group = state.tree.parent[group]


@compiled
def _look_at(state: State, request: int) -> None:
    state.requests[request].swept = state.totals.sweeps
    tokens = generated(state, request)
    counted = state.requests[request].counted
    if state.requests[request].known < 0 and bucket_of(tokens) > bucket_of(counted):
        record_growth(state, request, tokens, False)
        state.requests[request].counted = tokens
    add_footprint(state, state.footprint_next, request, 1.0)
    rest, squared = rest_of(state, request, tokens)
    state.totals.next_compute_s += rest * state.costs.gemm_s
    state.totals.next_memory_s += ((state.requests[request].prompt + tokens) * rest + squared / 2) * state.costs.read_s


@compiled
def waiting(state: State) -> int:
    """Requests in both queues."""
    left, right = state.queues[LEFT], state.queues[RIGHT]
    return left.last - left.first + right.last - right.first


@compiled
def _right_share(state: State) -> float:
    """Of the KV memory, what the right end may have: enough for steps that take longer than reading the weights.

    Not more, although the paper fills the memory: steps that keep the ratio of compute and reads are as good at half of
    it, and the rest takes what answers vary, so that prompts of the left end always find room.
    """
    totals, costs = state.totals, state.costs
    if (
        state.queues[LEFT].first == state.queues[LEFT].last
        or totals.remaining_compute_s <= NOTHING_S
        or costs.read_s == 0
    ):
        return 1.0
    if costs.bursts:
        return MOST_RIGHT  # each step reads the weights for those that decode alone, so many must
    least_s = max(costs.weights_s, ALIGNMENT * costs.gemm_s)
    reads_s = ENOUGH * least_s * totals.remaining_memory_s / totals.remaining_compute_s
    return min(MOST_RIGHT, reads_s / (costs.read_s * costs.capacity))


@compiled
def _left_work(state: State) -> float:
    """Work of a prompt token, in tokens of GEMM, of the requests that stand first at the left end."""
    first = state.queues[LEFT].first
    fresh, work = 1.0, 1.0
    for at in range(first, min(state.queues[LEFT].last, first + HEADS)):
        request = state.waiting[LEFT, at]
        fresh += state.requests[request].fresh
        work += state.requests[request].work
    return work / fresh


@compiled
def _refresh_some(state: State) -> None:
    """Work out the outlook of the next few groups that have news."""
    left = GROUPS_AT_ONCE
    for _ in range(min(GROUPS_LOOKED_AT, len(state.tree.parent))):
        group = state.totals.next_dirty
        state.totals.next_dirty = (group + 1) % len(state.tree.parent)
        if state.dirty[group]:
            refresh_group(state, group)
            left -= 1
            if left == 0:
                break


@compiled
def refresh_group(state: State, group: int) -> None:
    state.dirty[group] = False
    refresh(group, state.tree, state.seen, state.outlook)
    work_out_holds(state, group)
    state.doubt[group] = 1 / np.sqrt(1 + np.sum(state.seen.ended[group]))
    # Groups below that know little themselves, or are much like it, lean on this one.
    for below in range(group + 1, len(state.tree.parent)):
        if state.tree.parent[below] == group and (state.doubt[below] > DOUBTFUL or state.tree.leaning[below] >= ALIKE):
            state.dirty[below] = True
