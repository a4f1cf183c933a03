"""Keeps the scan's books when requests are admitted, prefilled, finished, dropped, put back or retracted."""

import numpy as np
from numpy.typing import NDArray

from engine_ext.arrays import Column
from engine_ext.compiled import compiled
from engine_ext.scan.footprint import add_footprint, rest_of
from engine_ext.scan.state import NOT_STARTED, RIGHT, State
from engine_ext.scan.sweep import end_sweep, record_growth, refresh_group


@compiled
def prefilled(state: State, request: int) -> None:
    """Note that a request's prompt is computed, and that its next output token comes with the next step."""
    _pend(state, request, -1)
    state.totals[0].decoding += 1
    state.requests[request].started = state.totals[0].clock - state.requests[request].counted


@compiled
def left_out(state: State, request: int, steps: int) -> None:
    """Note that a decoding request got no token in this many counted steps; the next decision may count the last."""
    if state.requests[request].started != NOT_STARTED:
        state.requests[request].started += steps
        state.totals[0].own_kv -= steps


@compiled
def finished(state: State, request: int, tokens: int) -> None:
    """Note that a request has ended with `tokens` output tokens."""
    _remove(state, request, tokens)
    if state.requests[request].known < 0:
        record_growth(state, request, tokens, True)


@compiled
def dropped(state: State, request: int, tokens: int) -> None:
    """Note that a request was given up with `tokens` output tokens, a lower bound on the length of its answer."""
    _remove(state, request, tokens)
    if state.requests[request].known < 0:
        record_growth(state, request, tokens, False)


@compiled
def put_back(state: State, request: int) -> None:
    """Note that the engine did not take a request that was just admitted; it waits again, first at its end."""
    _remove(state, request, state.requests[request].counted)
    _wait_first(state, request, state.requests[request].side)


@compiled
def retracted(state: State, request: int, tokens: int) -> None:
    """Note that the engine retracted a request with `tokens` output tokens; it waits again, first in line."""
    _remove(state, request, tokens)
    if state.requests[request].known < 0:
        record_growth(state, request, tokens, False)
    state.requests[request].counted = tokens
    _wait_first(state, request, RIGHT)


@compiled
def begin(state: State, running: Column, sides: Column, computed: NDArray[np.bool_]) -> None:
    """Count all requests, and work out every group's outlook and what remains to be done: once, before the first step.

    `running`: the requests that are in no queue, because they run; `computed`: whether each one's prompt is computed.
    """
    for side in range(2):
        for at in range(state.queues[side].first, state.queues[side].last):
            _count_waiting(state, state.waiting[side, at], 1)
    for group in range(len(state.tree.parent)):
        refresh_group(state, group)
    for k in range(len(running)):
        request = int(running[k])
        _count_running(state, request, int(sides[k]))
        if computed[k]:
            prefilled(state, request)
    end_sweep(state)


@compiled
def set_aside(state: State, request: int) -> None:
    """Take out a request that was just admitted and that the engine refuses again and again; another plan adds it."""
    _remove(state, request, state.requests[request].counted)


@compiled
def take_back(state: State, request: int) -> None:
    """Note that a waiting request will not run. It stays in its queue until it gets to an end of it."""
    _count_waiting(state, request, -1)
    state.requests[request].gone = 1
    state.totals[0].gone += 1


@compiled
def skip_gone(state: State) -> None:
    """Take requests that will not run from both ends of both queues."""
    for side in range(2):
        queue = state.queues[side]
        while queue.first < queue.last and state.requests[state.waiting[side, queue.first]].gone == 1:
            queue.first += 1
            state.totals[0].gone -= 1
        while queue.first < queue.last and state.requests[state.waiting[side, queue.last - 1]].gone == 1:
            queue.last -= 1
            state.totals[0].gone -= 1


@compiled
def bring_forward(state: State, side: int, at: int) -> None:
    """Let the request at this place of a queue go before all others of it."""
    first, request = state.queues[side].first, state.waiting[side, at]
    for place in range(at, first, -1):
        state.waiting[side, place] = state.waiting[side, place - 1]
    state.waiting[side, first] = request


@compiled
def take_in(state: State, request: int, side: int) -> None:
    """Take the candidate of this side from its queue, and count it as running."""
    mine, other = state.queues[side], state.queues[1 - side]
    if mine.first < mine.last:
        mine.first += 1
    else:
        other.last -= 1
    admit(state, request, side)


@compiled
def admit(state: State, request: int, side: int) -> None:
    """Count a request as running that is in no queue any more."""
    _count_waiting(state, request, -1)
    _count_running(state, request, side)


@compiled
def _count_running(state: State, request: int, side: int) -> None:
    totals = state.totals[0]
    state.requests[request].side = side
    state.requests[request].running_at = totals.running
    state.running[totals.running] = request
    totals.running += 1
    totals.own_kv += state.requests[request].fresh + state.requests[request].counted
    _pend(state, request, 1)
    # The current sweep will not reach it.
    state.requests[request].swept = totals.sweeps
    add_footprint(state, state.footprint, request, 1.0)
    add_footprint(state, state.footprint_next, request, 1.0)
    _add_remaining(state, request, state.requests[request].counted, 1)


@compiled
def _pend(state: State, request: int, sign: int) -> None:
    """Count a request among those whose prompts are being computed; `sign` -1 takes it out again."""
    again = state.requests[request].counted
    tokens, work = state.requests[request].fresh + again, state.requests[request].work + again
    state.totals[0].pending_tokens += sign * tokens
    state.totals[0].pending_work += sign * work
    if state.requests[request].side == RIGHT:
        state.totals[0].right_pending += sign * tokens


@compiled
def _add_remaining(state: State, request: int, tokens: int, sign: int) -> None:
    """Add a running request to the remaining work that the current sweep finds, if the sweep has looked at it."""
    if state.requests[request].swept != state.totals[0].sweeps:
        return
    rest, squared = rest_of(state, request, tokens)
    context = state.requests[request].prompt + tokens
    state.totals[0].next_compute_s += sign * rest * state.costs.gemm_s
    state.totals[0].next_memory_s += sign * (context * rest + squared / 2) * state.costs.read_s


@compiled
def _count_waiting(state: State, request: int, sign: int) -> None:
    if state.requests[request].known >= 0:
        rest = float(state.requests[request].known - state.requests[request].counted)
        context = state.requests[request].prompt + state.requests[request].counted
        prompt_s = (state.requests[request].work + state.requests[request].counted) * state.costs.gemm_s
        state.totals[0].known_compute_s += sign * (prompt_s + rest * state.costs.gemm_s)
        state.totals[0].known_prompts_s += sign * prompt_s
        state.totals[0].known_outputs += sign * rest
        state.totals[0].known_memory_s += sign * (context * rest + rest * rest / 2) * state.costs.read_s
    else:
        row = state.unknown[state.requests[request].group]
        row.requests += sign
        row.prompt += sign * state.requests[request].prompt
        row.work += sign * (state.requests[request].work + state.requests[request].counted)


@compiled
def _remove(state: State, request: int, tokens: int) -> None:
    """Remove a running request."""
    add_footprint(state, state.footprint, request, -1.0)
    if state.requests[request].swept == state.totals[0].sweeps:
        add_footprint(state, state.footprint_next, request, -1.0)
    totals = state.totals[0]
    _add_remaining(state, request, tokens, -1)
    # Subtract what the clock has added, which may differ from the engine's own count.
    by_clock = state.requests[request].counted
    if state.requests[request].started != NOT_STARTED:
        by_clock = totals.clock - state.requests[request].started
    totals.own_kv -= state.requests[request].fresh + by_clock
    if state.requests[request].started != NOT_STARTED:
        totals.decoding -= 1
        state.requests[request].started = NOT_STARTED
    else:
        _pend(state, request, -1)
    totals.running -= 1
    last, hole = state.running[totals.running], state.requests[request].running_at
    state.running[hole] = last
    state.requests[last].running_at = hole


@compiled
def _wait_first(state: State, request: int, side: int) -> None:
    queue = state.queues[side]
    if queue.first == 0:
        _move_to_end(state, side)
    queue.first -= 1
    state.waiting[side, queue.first] = request
    _count_waiting(state, request, 1)


@compiled
def _move_to_end(state: State, side: int) -> None:
    """Make room in front of a queue: it holds each request at most once and has twice as many places."""
    queue = state.queues[side]
    shift = state.waiting.shape[1] - queue.last
    for at in range(queue.last - 1, queue.first - 1, -1):
        state.waiting[side, at + shift] = state.waiting[side, at]
    queue.first += shift
    queue.last += shift
