"""Decides what a running engine admits in each step, and how many tokens it computes (BlendServe 5.3 and beyond).

Three things go beyond the paper. The step's budget is *paced*: it keeps compute and memory reads in the ratio of the
remaining work, so that both end together. Requests are admitted by *footprint*: the KV cache must hold them, beside all
running requests, at every point ahead, so that retractions stay rare. Lengths are *learned* from answers that have
ended and from those that still run.

The functions work on `State`, which compiled loops can hold; `DualScan` offers the rest of them as an object.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_ext.compiled import brief, compiled
from engine_ext.scan.books import begin, bring_forward, skip_gone, take_in
from engine_ext.scan.events import replay
from engine_ext.scan.footprint import fits
from engine_ext.scan.pace import hurried_tokens, most_tokens, paced_tokens
from engine_ext.scan.state import LEFT, NO_REQUEST, RIGHT, Backlog, State, StepCosts, new_state
from engine_ext.scan.sweep import sweep, waiting
from engine_ext.scan.tuning import BURST, BURST_CACHE, BURST_SLOTS, HEADS, PASSED, SOON

ANY_NUMBER = 1 << 30


class Space(NamedTuple):
    """KV tokens that are free `now`, those for what is projected `ahead`, and those `kept` for an urgent request.

    `tokens`: prompt tokens that the step computes so far.
    """

    now: int
    ahead: int
    tokens: int
    kept: int


class DualScan:
    """The scan of one engine; not thread-safe."""

    def __init__(self, state: State) -> None:
        self.state = state

    @classmethod
    def of(cls, backlog: Backlog, costs: StepCosts) -> "DualScan":
        """Create the scan as it stands before the first step."""
        state = new_state(backlog, costs)
        nobody = np.zeros(0, dtype=np.int64)
        begin(state, nobody, nobody, nobody.astype(np.bool_))
        return cls(state)

    def tell(self, events: NDArray[np.int64]) -> None:
        """Tell the scan what happened since the last step: a table of events, each with the request's place."""
        replay(self.state, events)

    def come_soon(self) -> None:
        """Let the next step admit the requests that were just held back, however few they are."""
        self.state.totals[0].soon = 1

    @property
    def waiting(self) -> int:
        return waiting(self.state)

    @property
    def running(self) -> int:
        return int(self.state.totals[0].running)

    @property
    def heads(self) -> tuple[int, int]:
        """The next request of the left end and of the right end; NO_REQUEST for an end whose own queue is empty."""
        return next_of(self.state, LEFT), next_of(self.state, RIGHT)

    @property
    def kv_tokens(self) -> tuple[int, int]:
        """KV tokens that requests of the left end and of the right end hold, without the prefixes that they share."""
        everything, right = self.state.footprint[0].kv, self.state.footprint[0].right_kv
        return max(0, int(everything - right)), max(0, int(right))

    @property
    def remaining_s(self) -> tuple[float, float]:
        """The expected remaining seconds of compute and of memory reads."""
        return float(self.state.totals[0].remaining_compute_s), float(self.state.totals[0].remaining_memory_s)


@compiled
def decide(
    state: State, used_kv: int, decoding_kv: int, decoding: int, pending: int, decoded: int, slots: int, most: int
) -> tuple[int, int]:
    """Decide the next step: return how many prompt tokens to compute and how many requests of `admitted` to admit.

    `used_kv`: KV tokens that admitted requests hold, or will hold once their prompts are computed. `decoding_kv`: KV
    tokens that the `decoding` requests read in a step. `pending`: prompt tokens of admitted requests that are still to
    be computed. `decoded`: output tokens that each decoding request has got since the last decision. `slots`: the most
    requests that the engine can take. `most`: the most prompt tokens, whatever the pace: online requests may leave no
    time for more.
    """
    state.totals[0].clock += decoded
    state.totals[0].own_kv += decoded * state.totals[0].decoding
    sweep(state)
    skip_gone(state)
    shared_kv = max(0, used_kv - state.totals[0].own_kv)  # shared prefixes in use, which no footprint counts
    capacity = state.costs.capacity
    space = Space(capacity - used_kv - SOON * decoding, capacity - shared_kv, pending, 0)
    right_waits = state.queues[RIGHT].first < state.queues[RIGHT].last
    if state.costs.bursts:
        budget = hurried = _burst(state, space, decoding, slots)
    else:
        # The right end fills the KV cache, and may hurry while the cache is not full; the left end keeps the pace.
        budget = paced_tokens(state, decoding_kv, decoding, pending)
        longest = most_tokens(state, decoding_kv * state.costs.read_s, decoding)
        hurried = max(budget, min(longest, hurried_tokens(state, decoding))) if right_waits else budget
        if _is_the_tail(state):
            budget = hurried = longest
    budget, hurried = min(budget, most), min(hurried, most)
    first = _first_side(state)
    if first == LEFT:  # a sample or a deadline, which no pace may hold up
        budget = hurried
    count, slots = 0, min(slots, len(state.admitted))
    for side in (first, 1 - first):
        count, space = _admit(state, side, hurried if side == RIGHT else budget, space, count, slots)
    if right_waits and state.totals[0].right_pending > budget:
        budget = hurried
    return budget, count


@compiled
def _admit(state: State, side: int, most: int, space: Space, count: int, slots: int) -> tuple[int, Space]:
    """Admit this side's next requests while they fit into a step of `most` prompt tokens, `space` and `slots`.

    `count` requests are admitted already. Returns how many are now, and the space that is left.
    """
    while space.tokens < most and count < slots:
        request = _candidate(state, side)
        if request == NO_REQUEST:
            break
        is_urgent = _is_more_urgent(state, side)
        alone = state.totals[0].running == 0  # whatever its size, it must run at some point
        # The right end's share serves throughput: what is urgent needs only room.
        if not alone and not _has_room(state, request, space, LEFT if is_urgent else side):
            if not is_urgent or space.kept > 0:
                break
            # Others may pass it, beside the room that it needs.
            need = state.requests[request].fresh + state.requests[request].counted + SOON
            space = Space(space.now, space.ahead, space.tokens, need)
            request = _smaller(state, side, space)
            if request == NO_REQUEST:
                break
        take_in(state, request, side)
        state.admitted[count] = request
        count += 1
        fresh = state.requests[request].fresh + state.requests[request].counted
        space = Space(space.now - fresh, space.ahead, space.tokens + fresh, space.kept)
        skip_gone(state)
    return count, space


@compiled
def _first_side(state: State) -> int:
    """Return the side that admits first: the more urgent one, or else the right one, unless the left has the sample."""
    if _is_more_urgent(state, LEFT):
        return LEFT
    left = state.queues[LEFT]
    has_sample = left.first < left.last and state.requests[state.waiting[LEFT, left.first]].first == 1
    return LEFT if has_sample and not _is_more_urgent(state, RIGHT) else RIGHT


@compiled
def _is_more_urgent(state: State, side: int) -> bool:
    """Return whether the head of this side's queue is in an earlier tier than all that the other side has."""
    mine, other = state.queues[side], state.queues[1 - side]
    if mine.first == mine.last:
        return False
    tier = state.requests[state.waiting[side, mine.first]].tier
    if other.first < other.last:
        return tier < state.requests[state.waiting[1 - side, other.first]].tier
    return tier < state.requests[state.waiting[side, mine.last - 1]].tier


@compiled
def _has_room(state: State, request: int, space: Space, side: int) -> bool:
    """Return whether the request's prompt fits into the cache now, and what it will hold in the steps ahead."""
    fresh = state.requests[request].fresh + state.requests[request].counted
    return fresh <= space.now - space.kept and fits(state, request, space.ahead - space.kept, side)


@compiled
def _smaller(state: State, side: int, space: Space) -> int:
    """Bring the first request forward that has room and is as urgent as the head, and return it, or NO_REQUEST."""
    at = _place_of_smaller(state, side, space)
    if at == NO_REQUEST:
        return NO_REQUEST
    bring_forward(state, side, at)
    return state.waiting[side, state.queues[side].first]


@compiled
def _place_of_smaller(state: State, side: int, space: Space) -> int:
    """Return where in this side's queue the first request stands that has room and is as urgent as the head."""
    queue = state.queues[side]
    tier = state.requests[state.waiting[side, queue.first]].tier
    for at in range(queue.first + 1, min(queue.last, queue.first + 1 + PASSED)):
        request = state.waiting[side, at]
        if state.requests[request].tier > tier:
            break
        if state.requests[request].gone == 0 and _has_room(state, request, space, LEFT):
            return at
    return NO_REQUEST


@compiled
def _is_the_tail(state: State) -> bool:
    """Return whether requests that begin late would end last, which costs more than a blend saves.

    This is so if all remaining work takes less time than the longest answer expected of the waiting requests, or if all
    waiting prompts take less time than a typical answer.
    """
    # An answer that runs alone still reads all the weights for each of its tokens (docs/simulator.md, the tail).
    totals, step_s = state.totals[0], state.costs.weights_s
    left_s = max(totals.remaining_compute_s, totals.remaining_memory_s)
    return left_s < totals.longest_answer * step_s or totals.remaining_prompts_s < totals.mean_answer * step_s


@compiled
def _burst(state: State, space: Space, decoding: int, slots: int) -> int:
    """Return a whole step of prompt tokens once there is room for enough of them, and 0 until then.

    Where a prefill stops decoding, nothing overlaps, so no pace is worth keeping: each step that decodes reads all the
    weights, and the fuller the cache, the fewer such steps there are (docs/planner.md).
    """
    totals, most = state.totals[0], int(state.costs.most_tokens)
    # `space.tokens` are those of a chunked prefill; the scan may not have counted them, if it expected a cached prefix.
    # Where none of ours runs, the next one need not fit into a share (`_admit`).
    if decoding == 0 or totals.running == 0 or space.tokens > 0 or totals.pending_tokens > 0 or totals.soon == 1:
        totals.soon = 0
        return most
    least = _waiting_tokens(state, min(most // BURST, int(state.costs.capacity) // BURST_CACHE))
    has_slots = slots >= min(waiting(state), (decoding + slots) // BURST_SLOTS)
    for side in range(2):
        request = _candidate(state, side)
        if request == NO_REQUEST:
            continue
        own = int(state.requests[request].fresh + state.requests[request].counted)
        if _is_more_urgent(state, side):
            kept = Space(space.now, space.ahead, 0, own + SOON)  # for the head, beside which others may pass it
            if _has_room(state, request, space, LEFT) or _place_of_smaller(state, side, kept) != NO_REQUEST:
                return most
        elif has_slots and _has_room(state, request, Space(space.now, space.ahead, 0, max(0, least - own)), side):
            return most
    return 0


@compiled
def _waiting_tokens(state: State, most: int) -> int:
    """Return the prompt tokens that wait, at most `most`; `most` if more than HEADS requests wait."""
    if waiting(state) > HEADS:
        return most
    tokens = 0
    for side in range(2):
        for at in range(state.queues[side].first, state.queues[side].last):
            request = state.waiting[side, at]
            if state.requests[request].gone == 0:
                tokens += state.requests[request].fresh + state.requests[request].counted
    return min(tokens, most)


@compiled
def _candidate(state: State, side: int) -> int:
    """Return the next request of this side or, if its queue is empty, the last one in the other side's queue.

    The last one waits while the other side has more urgent ones.
    """
    mine, other = state.queues[side], state.queues[1 - side]
    if mine.first < mine.last:
        return state.waiting[side, mine.first]
    if other.first < other.last and not _is_more_urgent(state, 1 - side):
        return state.waiting[1 - side, other.last - 1]
    return NO_REQUEST


@brief
def next_of(state: State, side: int) -> int:
    """Return the first request in this side's own queue, or NO_REQUEST."""
    queue = state.queues[side]
    return state.waiting[side, queue.first] if queue.first < queue.last else NO_REQUEST
