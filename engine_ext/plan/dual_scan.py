"""The dual scan while an engine runs: what to admit in each step, and how many tokens to compute (5.3 and beyond).

Three things go beyond the paper. The step's budget is *paced*: it keeps compute and memory reads in the ratio of the
work that remains, so that both end together. Requests are admitted by *footprint*: what the KV cache will hold at each
point to come, with everything that runs, has to fit, so that retraction stays an exception. And lengths are *learned*
from answers that end and from those that still run.

The functions work on `State`, which a simulator's compiled loop can hold; `DualScan` is the same as an object, for an
engine.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine_ext.plan.compiled import compiled
from engine_ext.plan.footprint import add_footprint, fits, rest_of
from engine_ext.plan.scan_state import (
    ALIGNMENT,
    BURSTS,
    CAPACITY,
    CLOCK,
    COMPUTE_LEFT,
    COUNTED,
    DECODING,
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
    MOST_TOKENS,
    NEXT_COMPUTE,
    NEXT_MEMORY,
    NO_REQUEST,
    NOT_STARTED,
    OWED,
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
    SIDE,
    STARTED,
    SWEEPS,
    SWEPT,
    WEIGHTS_S,
    WORK,
    Backlog,
    State,
    StepCosts,
    new_state,
)
from engine_ext.plan.sweep import NOTHING_S, end_sweep, record_growth, refresh_group, sweep
from engine_ext.plan.tree import Column

Floats = NDArray[np.float64]

ANY_NUMBER = 1 << 30
SOON = 32  # steps for whose output tokens there must be room, whoever is let in


@dataclass(frozen=True, slots=True)
class Decision:
    """`budget`: prompt tokens to compute in this step, for those in prefill first; `admitted`: requests to let in."""

    budget: int
    admitted: Column


class DualScan:
    """The scan of one engine; not safe for threads."""

    def __init__(self, backlog: Backlog, costs: StepCosts) -> None:
        self.state = new_state(backlog, costs)
        begin(self.state)

    def decide(
        self, used_kv: int, decoding_kv: int, decoding: int, pending: int, decoded: int = 1, slots: int = ANY_NUMBER
    ) -> Decision:
        """See the function of this name; the requests are let in when it returns."""
        budget, count = decide(self.state, used_kv, decoding_kv, decoding, pending, decoded, slots)
        return Decision(budget, self.state.admitted[:count].copy())

    def resume(self, requests: Column, sides: Column, prefilled: NDArray[np.bool_]) -> None:
        """Count requests that are in no queue as running; `prefilled`: their prompts are computed."""
        resume(self.state, requests, sides, prefilled)

    def prefilled(self, request: int) -> None:
        prefilled(self.state, request)

    def finished(self, request: int, tokens: int) -> None:
        finished(self.state, request, tokens)

    def retracted(self, request: int, tokens: int) -> None:
        retracted(self.state, request, tokens)

    def held(self, request: int) -> None:
        held(self.state, request)

    def come_soon(self) -> None:
        """Those just held are to come with the next step."""
        self.state.sums[OWED] = self.state.machine[MOST_TOKENS]

    def dropped(self, request: int, tokens: int) -> None:
        dropped(self.state, request, tokens)

    @property
    def waiting(self) -> int:
        return waiting(self.state)

    @property
    def running(self) -> int:
        return int(self.state.counts[RUNNING])

    @property
    def remaining_s(self) -> tuple[float, float]:
        """Seconds of compute and of memory reads that are expected to remain."""
        return float(self.state.sums[COMPUTE_LEFT]), float(self.state.sums[MEMORY_LEFT])


@compiled
def decide(
    state: State, used_kv: int, decoding_kv: int, decoding: int, pending: int, decoded: int, slots: int
) -> tuple[int, int]:
    """The next step: how many prompt tokens to compute, and how many requests, in `admitted`, to let in.

    `used_kv`: tokens of KV cache that admitted requests hold, or will once their prompts are computed; `decoding_kv`:
    tokens that the `decoding` requests read in a step; `pending`: prompt tokens of admitted requests that are still to
    be computed; `decoded`: output tokens that each of the decoding ones has got since the last decision; `slots`: the
    most requests that the engine takes.
    """
    state.counts[CLOCK] += decoded
    state.counts[OWN_KV] += decoded * state.counts[DECODING]
    sweep(state)
    budget = _budget(state, decoding_kv, decoding, pending)
    shared_kv = max(0, used_kv - state.counts[OWN_KV])  # prefixes in use, which no footprint counts
    room = state.machine[CAPACITY] - shared_kv
    physical = state.machine[CAPACITY] - used_kv - SOON * decoding
    # The right side fills the KV cache and may hurry while that is not full; the left side keeps the pace.
    rightful = state.counts[RIGHT_FIRST] < state.counts[RIGHT_LAST]
    hurried = max(budget, _hurry(state, decoding)) if rightful else budget
    if state.machine[BURSTS] > 0:
        held_back = rightful and not fits(state, _candidate(state, RIGHT), room, RIGHT)
        budget = _burst(state, budget if held_back else hurried, decoding, decoded)
        hurried = budget
    let_in, tokens = 0, pending
    for side in (RIGHT, LEFT):
        most = hurried if side == RIGHT else budget
        while tokens < most and let_in < min(slots, len(state.admitted)):
            request = _candidate(state, side)
            if request == NO_REQUEST:
                break
            alone = state.counts[RUNNING] == 0  # whatever it is, it must run some time
            fresh = state.requests[request, FRESH] + state.requests[request, COUNTED]
            if not alone and (fresh > physical or not fits(state, request, room, side)):
                break
            _let_in(state, request, side)
            state.admitted[let_in] = request
            let_in += 1
            tokens += fresh
            physical -= fresh
    if rightful and state.sums[RIGHT_PENDING] > budget:
        budget = hurried
    return budget, let_in


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


@compiled
def waiting(state: State) -> int:
    """Requests in both queues."""
    return state.counts[LEFT_LAST] - state.counts[LEFT_FIRST] + state.counts[RIGHT_LAST] - state.counts[RIGHT_FIRST]


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
def _budget(state: State, decoding_kv: int, decoding: int, pending: int) -> int:
    """Prompt tokens of the step that keep compute and memory reads in the ratio of the work that remains."""
    machine, sums = state.machine, state.sums
    most = int(machine[MOST_TOKENS])
    token_s, reads_s = _prompt_token_s(state), decoding_kv * machine[READ_S]
    if decoding == 0 or sums[MEMORY_LEFT] <= NOTHING_S:
        return max(0, most - decoding)
    compute_s = (sums[COMPUTE_LEFT] + pending * token_s) / sums[MEMORY_LEFT] * reads_s
    paced = (compute_s - decoding * machine[GEMM_S]) / token_s
    tokens = decoding + max(paced, _riding(machine, token_s, reads_s, decoding))
    if tokens >= 2 * ALIGNMENT:
        tokens = np.floor(tokens / ALIGNMENT + 0.5) * ALIGNMENT
    return int(max(0.0, min(tokens, most) - decoding))


@compiled
def _riding(machine: Floats, token_s: float, reads_s: float, decoding: int) -> float:
    """Prompt tokens whose GEMM hides behind reading the weights, as long as their attention hides behind it too."""
    weights_s, attention_s = machine[WEIGHTS_S], token_s - machine[GEMM_S]
    riding = weights_s / machine[GEMM_S] - decoding
    if attention_s > 0:
        riding = min(riding, (max(reads_s, 2 * weights_s) - weights_s) / attention_s)
    return riding


@compiled
def _hurry(state: State, decoding: int) -> int:
    """Prompt tokens of a step that would keep the pace if the KV cache were full."""
    machine, sums = state.machine, state.sums
    most = machine[MOST_TOKENS]
    if sums[MEMORY_LEFT] > NOTHING_S:
        seconds = sums[COMPUTE_LEFT] / sums[MEMORY_LEFT] * machine[CAPACITY] * machine[READ_S]
        most = min(most, max(seconds / _prompt_token_s(state), ALIGNMENT))
    return max(0, int(most / ALIGNMENT) * ALIGNMENT - decoding)


@compiled
def _burst(state: State, tokens: int, decoding: int, decoded: int) -> int:
    """All prompt tokens of a step once as many are owed, nothing until then."""
    if decoded > 0:
        state.sums[OWED] += tokens
    most = int(state.machine[MOST_TOKENS])
    if decoding > 0 and state.sums[OWED] < most:
        return 0
    state.sums[OWED] = 0.0
    return most


@compiled
def _candidate(state: State, side: int) -> int:
    """The next request at this end; where its queue is empty, the far end of the other one."""
    counts = state.counts
    if side == LEFT:
        if counts[LEFT_FIRST] < counts[LEFT_LAST]:
            return state.waiting[LEFT, counts[LEFT_FIRST]]
        if counts[RIGHT_FIRST] < counts[RIGHT_LAST]:
            return state.waiting[RIGHT, counts[RIGHT_LAST] - 1]
    else:
        if counts[RIGHT_FIRST] < counts[RIGHT_LAST]:
            return state.waiting[RIGHT, counts[RIGHT_FIRST]]
        if counts[LEFT_FIRST] < counts[LEFT_LAST]:
            return state.waiting[LEFT, counts[LEFT_LAST] - 1]
    return NO_REQUEST


@compiled
def _let_in(state: State, request: int, side: int) -> None:
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
def _prompt_token_s(state: State) -> float:
    """Seconds of computing a prompt token, its attention included: of those pending, or else of the next ones."""
    work = state.sums[LEFT_WORK]
    if state.sums[PENDING_TOKENS] > 0:
        work = state.sums[PENDING_WORK] / state.sums[PENDING_TOKENS]
    return state.machine[GEMM_S] * work


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
        state.sums[KNOWN_COMPUTE] += (
            sign * (state.requests[request, WORK] + state.requests[request, COUNTED] + rest) * state.machine[GEMM_S]
        )
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
