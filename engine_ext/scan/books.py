"""What the scan keeps of its requests when they are let in, prefilled, end, are taken back, or begin to be counted."""

import numpy as np
from numpy.typing import NDArray

from engine_ext.compiled import compiled
from engine_ext.plan.tree import Column
from engine_ext.scan.footprint import add_footprint, rest_of
from engine_ext.scan.state import (
    CLOCK,
    COUNTED,
    DECODING,
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
    NEXT_COMPUTE,
    NEXT_MEMORY,
    NOT_STARTED,
    OWN_KV,
    PENDING_TOKENS,
    PENDING_WORK,
    PLACE,
    PROMPT,
    READ_S,
    RIGHT,
    RIGHT_FIRST,
    RIGHT_LAST,
    RIGHT_PENDING,
    RUNNING,
    SAMPLE_LAST,
    SIDE,
    STARTED,
    SWEEPS,
    SWEPT,
    WORK,
    State,
)
from engine_ext.scan.sweep import end_sweep, record_growth, refresh_group


@compiled
def prefilled(state: State, request: int) -> None:
    """The request's prompt is computed and its next output token comes with the next step."""
    _pend(state, request, -1)
    state.counts[DECODING] += 1
    state.requests[request, STARTED] = state.counts[CLOCK] - state.requests[request, COUNTED]


@compiled
def finished(state: State, request: int, tokens: int) -> None:
    """The request has ended with so many output tokens."""
    _remove(state, request, tokens)
    if state.requests[request, KNOWN] < 0:
        record_growth(state, request, tokens, True)


@compiled
def dropped(state: State, request: int, tokens: int) -> None:
    """The request was given up with so many output tokens, which tell how long it would have become at least."""
    _remove(state, request, tokens)
    if state.requests[request, KNOWN] < 0:
        record_growth(state, request, tokens, False)


@compiled
def held(state: State, request: int) -> None:
    """The engine did not take a request that was just let in; it waits again, first at its end."""
    _remove(state, request, state.requests[request, COUNTED])
    _wait_first(state, request, state.requests[request, SIDE])


@compiled
def resume(state: State, requests: Column, sides: Column, computed: NDArray[np.bool_]) -> None:
    """Count requests that are in no queue as running; `computed`: their prompts are."""
    for k in range(len(requests)):
        request = int(requests[k])
        _count_running(state, request, int(sides[k]))
        if computed[k]:
            prefilled(state, request)


@compiled
def retracted(state: State, request: int, tokens: int) -> None:
    """The engine took back the KV cache of a request with so many output tokens; it waits again, first in line."""
    _remove(state, request, tokens)
    if state.requests[request, KNOWN] < 0:
        record_growth(state, request, tokens, False)
    state.requests[request, COUNTED] = tokens
    _wait_first(state, request, RIGHT)


@compiled
def begin(state: State) -> None:
    """Count what waits and work out every group's outlook: once, before the first step."""
    for side in range(2):
        first = state.counts[LEFT_FIRST if side == LEFT else RIGHT_FIRST]
        last = state.counts[LEFT_LAST if side == LEFT else RIGHT_LAST]
        for at in range(first, last):
            _count_waiting(state, state.waiting[side, at], 1)
    for group in range(len(state.parent)):
        refresh_group(state, group)
    end_sweep(state)


@compiled
def take_in(state: State, request: int, side: int) -> None:
    """Take the candidate of this side from its queue, and count it as running."""
    counts = state.counts
    if side == LEFT:
        if counts[LEFT_FIRST] < counts[LEFT_LAST]:
            counts[LEFT_FIRST] += 1
        else:
            counts[RIGHT_LAST] -= 1
    elif counts[RIGHT_FIRST] < counts[RIGHT_LAST]:
        counts[RIGHT_FIRST] += 1
    else:
        counts[LEFT_LAST] -= 1
    _count_waiting(state, request, -1)
    _count_running(state, request, side)


@compiled
def _count_running(state: State, request: int, side: int) -> None:
    counts = state.counts
    state.requests[request, SIDE] = side
    state.requests[request, PLACE] = counts[RUNNING]
    state.running[counts[RUNNING]] = request
    counts[RUNNING] += 1
    counts[OWN_KV] += state.requests[request, FRESH] + state.requests[request, COUNTED]
    _pend(state, request, 1)
    # The sweep under way will not come to it.
    state.requests[request, SWEPT] = counts[SWEEPS]
    add_footprint(state, state.footprint, request, 1.0)
    add_footprint(state, state.footprint_next, request, 1.0)
    _add_remaining(state, request, state.requests[request, COUNTED], 1)


@compiled
def _pend(state: State, request: int, sign: int) -> None:
    """Count a request among those whose prompts are being computed."""
    again = state.requests[request, COUNTED]
    tokens, work = state.requests[request, FRESH] + again, state.requests[request, WORK] + again
    state.sums[PENDING_TOKENS] += sign * tokens
    state.sums[PENDING_WORK] += sign * work
    if state.requests[request, SIDE] == RIGHT:
        state.sums[RIGHT_PENDING] += sign * tokens


@compiled
def _add_remaining(state: State, request: int, tokens: int, sign: int) -> None:
    """Count a running request among what the sweep under way finds to remain, if it has been looked at."""
    if state.requests[request, SWEPT] != state.counts[SWEEPS]:
        return
    rest, squared = rest_of(state, request, tokens)
    context = state.requests[request, PROMPT] + tokens
    state.sums[NEXT_COMPUTE] += sign * rest * state.machine[GEMM_S]
    state.sums[NEXT_MEMORY] += sign * (context * rest + squared / 2) * state.machine[READ_S]


@compiled
def _count_waiting(state: State, request: int, sign: int) -> None:
    if state.requests[request, KNOWN] >= 0:
        rest = float(state.requests[request, KNOWN] - state.requests[request, COUNTED])
        context = state.requests[request, PROMPT] + state.requests[request, COUNTED]
        prompt_s = (state.requests[request, WORK] + state.requests[request, COUNTED]) * state.machine[GEMM_S]
        state.sums[KNOWN_COMPUTE] += sign * (prompt_s + rest * state.machine[GEMM_S])
        state.sums[KNOWN_PROMPTS] += sign * prompt_s
        state.sums[KNOWN_OUTPUTS] += sign * rest
        state.sums[KNOWN_MEMORY] += sign * (context * rest + rest * rest / 2) * state.machine[READ_S]
    else:
        row = state.held_back[state.requests[request, GROUP]]
        row[0] += sign
        row[1] += sign * state.requests[request, PROMPT]
        row[2] += sign * (state.requests[request, WORK] + state.requests[request, COUNTED])


@compiled
def _remove(state: State, request: int, tokens: int) -> None:
    """Take a running request out."""
    add_footprint(state, state.footprint, request, -1.0)
    if state.requests[request, SWEPT] == state.counts[SWEEPS]:
        add_footprint(state, state.footprint_next, request, -1.0)
    counts = state.counts
    _add_remaining(state, request, tokens, -1)
    # What was added to it, by the clock, which the engine's own count need not equal.
    by_clock = state.requests[request, COUNTED]
    if state.requests[request, STARTED] != NOT_STARTED:
        by_clock = counts[CLOCK] - state.requests[request, STARTED]
    counts[OWN_KV] -= state.requests[request, FRESH] + by_clock
    if state.requests[request, STARTED] != NOT_STARTED:
        counts[DECODING] -= 1
        state.requests[request, STARTED] = NOT_STARTED
    else:
        _pend(state, request, -1)
    counts[RUNNING] -= 1
    last, hole = state.running[counts[RUNNING]], state.requests[request, PLACE]
    state.running[hole] = last
    state.requests[last, PLACE] = hole


@compiled
def _wait_first(state: State, request: int, side: int) -> None:
    first = LEFT_FIRST if side == LEFT else RIGHT_FIRST
    if state.counts[first] == 0:
        _move_to_end(state, side)
    state.counts[first] -= 1
    state.waiting[side, state.counts[first]] = request
    _count_waiting(state, request, 1)


@compiled
def _move_to_end(state: State, side: int) -> None:
    """Make room in front of a queue, which holds each request at most once and has twice the places."""
    begin, end = (LEFT_FIRST, LEFT_LAST) if side == LEFT else (RIGHT_FIRST, RIGHT_LAST)
    first, last = state.counts[begin], state.counts[end]
    shift = state.waiting.shape[1] - last
    for at in range(last - 1, first - 1, -1):
        state.waiting[side, at + shift] = state.waiting[side, at]
    state.counts[begin], state.counts[end] = first + shift, last + shift
    if side == LEFT:
        state.counts[SAMPLE_LAST] += shift
