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

from engine_ext.compiled import compiled
from engine_ext.plan.tree import Column
from engine_ext.scan.books import (
    begin,
    dropped,
    finished,
    held,
    prefilled,
    retracted,
    take_in,
)
from engine_ext.scan.footprint import fits
from engine_ext.scan.state import (
    ALIGNMENT,
    ALL,
    AN_ANSWER,
    BURSTS,
    CAPACITY,
    CLOCK,
    COMPUTE_LEFT,
    COUNTED,
    DECODING,
    FRESH,
    GEMM_S,
    LEFT,
    LEFT_FIRST,
    LEFT_LAST,
    LEFT_WORK,
    LONGEST_ANSWER,
    MEMORY_LEFT,
    MOST_TOKENS,
    NO_REQUEST,
    OF_RIGHT,
    OWED,
    OWN_KV,
    PENDING_TOKENS,
    PENDING_WORK,
    PROMPTS_LEFT,
    READ_S,
    RIGHT,
    RIGHT_FIRST,
    RIGHT_LAST,
    RIGHT_PENDING,
    RUNNING,
    SAMPLE_LAST,
    WEIGHTS_S,
    Backlog,
    State,
    StepCosts,
    new_state,
)
from engine_ext.scan.sweep import HEADS, MOST_COMPUTE, NOTHING_S, sweep, waiting

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

    def __init__(self, state: State) -> None:
        self.state = state

    @classmethod
    def of(cls, backlog: Backlog, costs: StepCosts) -> "DualScan":
        """Before the first step."""
        state = new_state(backlog, costs)
        begin(state)
        return cls(state)

    def decide(
        self, used_kv: int, decoding_kv: int, decoding: int, pending: int, decoded: int = 1, slots: int = ANY_NUMBER
    ) -> Decision:
        """See the function of this name; the requests are let in when it returns."""
        budget, count = decide(self.state, used_kv, decoding_kv, decoding, pending, decoded, slots)
        return Decision(budget, self.state.admitted[:count].copy())

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
    def heads(self) -> tuple[int, int]:
        """The requests that the left and the right end give next, NO_REQUEST where one has none of its own."""
        counts, queues = self.state.counts, self.state.waiting
        left = queues[LEFT, counts[LEFT_FIRST]] if counts[LEFT_FIRST] < counts[LEFT_LAST] else NO_REQUEST
        right = queues[RIGHT, counts[RIGHT_FIRST]] if counts[RIGHT_FIRST] < counts[RIGHT_LAST] else NO_REQUEST
        return int(left), int(right)

    @property
    def kv_tokens(self) -> tuple[int, int]:
        """KV tokens that requests of the left and of the right end hold, prefixes that they share left out."""
        everything, right = self.state.footprint[0, ALL], self.state.footprint[0, OF_RIGHT]
        return max(0, int(everything - right)), max(0, int(right))

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
    if _is_the_tail(state):
        budget = hurried = max(0, int(state.machine[MOST_TOKENS]) - decoding)
    if state.machine[BURSTS] > 0:
        held_back = rightful and not fits(state, _candidate(state, RIGHT), room, RIGHT)
        budget = _burst(state, budget if held_back else hurried, decoding, decoded)
        hurried = budget
    let_in, tokens = 0, pending
    asks = state.counts[LEFT_FIRST] < state.counts[SAMPLE_LAST]  # the sample is first, whatever the pace
    if asks:
        budget = hurried
    for side in (LEFT, RIGHT) if asks else (RIGHT, LEFT):
        most = hurried if side == RIGHT else budget
        while tokens < most and let_in < min(slots, len(state.admitted)):
            request = _candidate(state, side)
            if request == NO_REQUEST:
                break
            alone = state.counts[RUNNING] == 0  # whatever it is, it must run some time
            fresh = state.requests[request, FRESH] + state.requests[request, COUNTED]
            if not alone and (fresh > physical or not fits(state, request, room, side)):
                break
            take_in(state, request, side)
            state.admitted[let_in] = request
            let_in += 1
            tokens += fresh
            physical -= fresh
    if rightful and state.sums[RIGHT_PENDING] > budget:
        budget = hurried
    return budget, let_in


@compiled
def _is_the_tail(state: State) -> bool:
    """Whether whoever begins late ends last, which costs more than a blend saves.

    So it is where all that remains takes less than the longest answer to be expected of those that wait, or all prompts
    less than a usual answer.
    """
    sums, step_s = state.sums, state.machine[WEIGHTS_S]
    left_s = max(sums[COMPUTE_LEFT], sums[MEMORY_LEFT])
    return left_s < sums[LONGEST_ANSWER] * step_s or sums[PROMPTS_LEFT] < sums[AN_ANSWER] * step_s


@compiled
def _budget(state: State, decoding_kv: int, decoding: int, pending: int) -> int:
    """Prompt tokens of the step that keep compute and memory reads in the ratio of the work that remains."""
    machine, sums = state.machine, state.sums
    most = int(machine[MOST_TOKENS])
    token_s, reads_s = _prompt_token_s(state), decoding_kv * machine[READ_S]
    if decoding == 0 or sums[MEMORY_LEFT] <= NOTHING_S:
        return max(0, most - decoding)
    compute_s = _ratio(state, pending * token_s) * reads_s
    paced = (compute_s - decoding * machine[GEMM_S]) / token_s
    tokens = decoding + max(paced, _riding(machine, token_s, reads_s, decoding))
    if tokens >= 2 * ALIGNMENT:
        tokens = np.floor(tokens / ALIGNMENT + 0.5) * ALIGNMENT
    return int(max(0.0, min(tokens, most) - decoding))


@compiled
def _ratio(state: State, pending_s: float) -> float:
    """Of compute to memory reads in what remains, as far as steps keep to it.

    Where compute is more than reads it is what counts, and every step that computes longer than it reads is as good: a
    still longer one makes decoding wait, and whoever runs long is known late.
    """
    ratio = (state.sums[COMPUTE_LEFT] + pending_s) / state.sums[MEMORY_LEFT]
    return ratio if state.machine[BURSTS] > 0 else min(ratio, MOST_COMPUTE)


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
        seconds = _ratio(state, 0.0) * machine[CAPACITY] * machine[READ_S]
        most = min(most, max(seconds / _prompt_token_s(state), ALIGNMENT))
    return max(0, int(most / ALIGNMENT) * ALIGNMENT - decoding)


@compiled
def _burst(state: State, tokens: int, decoding: int, decoded: int) -> int:
    """All prompt tokens of a step once as many are owed, or all that there are; nothing until then."""
    state.sums[OWED] += decoded * tokens
    most = int(state.machine[MOST_TOKENS])
    if decoding > 0 and state.sums[OWED] < min(most, _waiting_tokens(state, most)):
        return 0
    state.sums[OWED] = 0.0
    return most


@compiled
def _waiting_tokens(state: State, most: int) -> int:
    """Prompt tokens of all that waits and of what is being computed, as far as it is less than `most`."""
    if waiting(state) > HEADS:
        return most
    tokens = int(state.sums[PENDING_TOKENS])
    for side in range(2):
        first = state.counts[LEFT_FIRST if side == LEFT else RIGHT_FIRST]
        last = state.counts[LEFT_LAST if side == LEFT else RIGHT_LAST]
        for at in range(first, last):
            request = state.waiting[side, at]
            tokens += state.requests[request, FRESH] + state.requests[request, COUNTED]
    return max(1, tokens)


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
def _prompt_token_s(state: State) -> float:
    """Seconds of computing a prompt token, its attention included: of those pending, or else of the next ones."""
    work = state.sums[LEFT_WORK]
    if state.sums[PENDING_TOKENS] > 0:
        work = state.sums[PENDING_WORK] / state.sums[PENDING_TOKENS]
    return state.machine[GEMM_S] * work
