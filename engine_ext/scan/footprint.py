"""Projects what all running requests will hold of the KV cache, and tells whether one more request fits."""

import numpy as np

from engine_ext.arrays import Column, Records
from engine_ext.compiled import brief, compiled
from engine_ext.plan.buckets import BUCKETS, EDGES, LONGEST, bucket_of
from engine_ext.scan.state import AHEAD, GROWTH, NOT_STARTED, RIGHT, Footprint, State
from engine_ext.scan.tuning import LIKELY, NEGLIGIBLE, SELDOM

SPAN = (AHEAD + GROWTH).astype(np.float64)


@compiled
def add_footprint(state: State, table: Records[Footprint], request: int, sign: float) -> None:
    """Add the KV tokens that a request is expected to hold at every point ahead, with their variance.

    `sign`: 1 to add them, -1 to take them out again.
    """
    tokens = generated(state, request)
    group, own = state.requests[request].group, state.requests[request].fresh + tokens
    right = 1.0 if state.requests[request].side == RIGHT else 0.0
    if state.requests[request].known >= 0:
        left = max(state.requests[request].known - tokens, 1)
        for k in range(len(AHEAD)):
            if AHEAD[k] >= left:
                break
            kv = sign * (own + min(AHEAD[k] + GROWTH[k], left))
            table[k].kv += kv
            table[k].right_kv += right * kv
        return
    chances, doubt = state.holds[group, bucket_of(tokens)], state.doubt[group]
    for k in range(len(AHEAD)):
        holds = chances[k]
        if holds == 0.0:
            break
        tokens_then = own + SPAN[k]
        kv = sign * holds * tokens_then
        table[k].kv += kv
        table[k].variance += kv * (1 - holds) * tokens_then
        table[k].right_kv += right * kv
        # A wrong estimate is wrong for all requests of the group alike, so doubt adds up linearly, unlike the spread.
        table[k].doubt += doubt * kv


@compiled
def fits(state: State, request: int, room: float, side: int) -> bool:
    """Return whether the request fits into the KV cache at every point ahead and, on the right side, into its share."""
    tokens = state.requests[request].counted
    chances = state.holds[state.requests[request].group, bucket_of(tokens)]
    own, is_known, left = (
        state.requests[request].fresh + tokens,
        state.requests[request].known >= 0,
        state.requests[request].known - tokens,
    )
    table, margin, share = state.footprint, state.costs.margin, state.totals[0].right_share
    for k in range(len(AHEAD)):
        if is_known and AHEAD[k] >= max(left, 1):
            break
        holds = 1.0 if is_known else chances[k]
        if holds == 0.0:
            break
        kv = own + AHEAD[k] + (min(GROWTH[k], left - AHEAD[k]) if is_known else GROWTH[k])
        if side == RIGHT or state.costs.bursts:
            spread = max(0.0, table[k].variance) + holds * (1 - holds) * kv * kv
            kept_free = margin * (np.sqrt(spread) + table[k].doubt)
        elif holds < LIKELY:
            break  # do not refuse a short answer for what it is unlikely to hold then
        else:
            kept_free = 0.0  # a left prompt that waits leaves a step that only reads (docs/planner.md)
        if table[k].kv + holds * kv + kept_free > room:
            return False
        if side == RIGHT and table[k].right_kv + holds * kv > share * room:
            return False
    return True


@compiled
def rest_of(state: State, request: int, tokens: int) -> tuple[float, float]:
    """Return the expected output tokens still to come after `tokens`, and the expectation of their square."""
    if state.requests[request].known >= 0:
        exact = float(max(0, state.requests[request].known - tokens))
        return exact, exact * exact
    group, bucket = state.requests[request].group, bucket_of(tokens)
    part = (tokens - EDGES[bucket]) / (EDGES[bucket + 1] - EDGES[bucket])
    rest = (1 - part) * state.outlook.rest[group, bucket] + part * state.outlook.rest[group, bucket + 1]
    squared = (1 - part) * state.outlook.rest_squared[group, bucket] + part * state.outlook.rest_squared[
        group, bucket + 1
    ]
    most = float(max(1, state.requests[request].cap - tokens))
    return min(rest, most), min(squared, most * most)


@compiled
def generated(state: State, request: int) -> int:
    """Return the output tokens of a running request, by the scan's clock."""
    if state.requests[request].started == NOT_STARTED:
        return state.requests[request].counted
    return max(
        state.requests[request].counted,
        min(state.totals[0].clock - state.requests[request].started, state.requests[request].cap),
    )


@brief
def output_tokens(state: State, requests: Column) -> Column:
    """Return the output tokens of these running requests, by the scan's clock."""
    tokens = np.empty(len(requests), dtype=np.int64)
    for k in range(len(requests)):
        tokens[k] = generated(state, int(requests[k]))
    return tokens


@compiled
def work_out_holds(state: State, group: int) -> None:
    """Work out, for each length bucket, the probability that an answer in it still runs at every point ahead."""
    for bucket in range(BUCKETS):
        now = state.outlook.stays[group, bucket]
        state.holds[group, bucket, 0] = 1.0
        chance = 1.0
        for k in range(1, len(AHEAD)):
            tokens = EDGES[bucket] + AHEAD[k]
            if chance <= NEGLIGIBLE or tokens >= state.tree.caps[group]:  # it never rises again
                chance = 0.0
            elif now < SELDOM:  # no answer this long was seen: give it an even chance to double
                chance = 1.0 / (1.0 + AHEAD[k] / (EDGES[bucket] + 1.0))
            else:
                chance = _chance(state, group, tokens) / now
            state.holds[group, bucket, k] = chance if chance > NEGLIGIBLE else 0.0


@compiled
def _chance(state: State, group: int, tokens: int) -> float:
    """Return the probability that an answer of the group reaches this many tokens."""
    if tokens >= LONGEST:
        return 0.0
    bucket = bucket_of(tokens)
    part = (tokens - EDGES[bucket]) / (EDGES[bucket + 1] - EDGES[bucket])
    return (1 - part) * state.outlook.stays[group, bucket] + part * state.outlook.stays[group, bucket + 1]
