"""Holds what the dual scan knows while an engine runs, as arrays that change in place."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_ext.arrays import Bools, Column, Floats, Records, new_records
from engine_ext.costs.cost import CostModel
from engine_ext.plan.buckets import BUCKETS, LONGEST
from engine_ext.plan.groups import Groups
from engine_ext.plan.lengths import GroupTree, Outlook, Seen
from engine_ext.scan.tiers import ORDINARY
from engine_ext.scan.tuning import BURST_MARGIN

# Steps from now at which the footprint is projected: two per octave, and nothing beyond the last.
AHEAD = np.array([0, 16, *(step << k for k in range(13) for step in (24, 32))], dtype=np.int64)
# Running requests keep growing between two points: by how much until half-way to the next.
GROWTH = np.array([0, *((AHEAD[2:] - AHEAD[1:-1]) // 2), 0], dtype=np.int64)
NO_REQUEST = -1
NOT_STARTED = -(1 << 30)
LEFT, RIGHT = 0, 1


class StepCosts(NamedTuple):
    """The costs of a step: seconds per token of GEMM, per KV token read, and for reading the weights once
    or whatever else no step is shorter than.

    `capacity`: tokens of KV cache. `most_tokens`: the largest step. `margin`: how many standard deviations of the
    projected footprint to keep free. `quadratic_s`: seconds of prefill attention per unit of a chunk's end^2 - begin^2.
    `bursts`: prompts run in steps of their own, and a prefill stops decoding (or, with PD-multiplexing, the next one
    begins when it has ended). So prompts wait until enough of them fit for a whole step, and less is kept free.
    """

    gemm_s: float
    read_s: float
    weights_s: float
    capacity: int
    most_tokens: int = 8192
    margin: float = 1.0
    quadratic_s: float = 0.0
    bursts: bool = False

    @classmethod
    def of(cls, cost: CostModel, capacity: int, most_tokens: int = 8192, bursts: bool = False) -> "StepCosts":
        return cls(
            cost.gemm_s_per_token,
            cost.read_s_per_token,
            cost.floor_s,
            capacity,
            most_tokens,
            quadratic_s=cost.quadratic_s,
            bursts=bursts,
        )

    def normalize(self) -> "StepCosts":
        """Return these costs with one type per field, so that functions compile once, and with the bursts' margin."""
        return StepCosts(
            float(self.gemm_s),
            float(self.read_s),
            float(self.weights_s),
            int(self.capacity),
            int(self.most_tokens),
            float(BURST_MARGIN * self.margin if self.bursts else self.margin),
            float(self.quadratic_s),
            bool(self.bursts),
        )


@dataclass(frozen=True, slots=True)
class Backlog:
    """The requests to run, as int64 columns by request.

    `prompt`: prompt tokens. `fresh`: those that a request does not share with the one before it at its end. `known`:
    output tokens or UNKNOWN. `caps`: max_tokens. `left`, `right`: the requests in the order in which each end admits
    them, each request at most once. `counted`: output tokens that each request already has, which `seen` includes.
    `first`: whether it comes before the other end's requests too, whatever the pace. `tier`: its urgency
    (scan/tiers.py).
    """

    prompt: Column
    fresh: Column
    known: Column
    caps: Column
    left: Column
    right: Column
    groups: Groups
    seen: Seen
    counted: Column | None = None
    first: Bools | None = None
    tier: Column | None = None

    @classmethod
    def of_nothing(cls) -> "Backlog":
        """Return the backlog without requests."""
        nobody, groups = np.zeros(0, dtype=np.int64), Groups.unlike(np.zeros(0, dtype=np.int64), np.array([-1]))
        return cls(nobody, nobody, nobody, nobody, nobody, nobody, groups, Seen.nothing(len(groups)))


class Request:
    """One request, as int32 fields.

    `prompt`: prompt tokens. `fresh`: those not shared with the request before it in the scan. `work`: the work of
    computing the fresh ones, in tokens of GEMM. `known`: output tokens or UNKNOWN. `cap`: max_tokens. `side`: the side
    that admitted it. `started`: the clock at its first output token, or NOT_STARTED. `counted`: output tokens that
    `seen` includes. `swept`: the last sweep that looked at it. `running_at`: its index in `State.running`. `tier`,
    `first`: as in `Backlog`. `gone`: 1 if it was taken back while it waited, and its queue still has it.
    """

    prompt: int
    fresh: int
    work: int
    known: int
    cap: int
    group: int
    side: int
    started: int
    counted: int
    swept: int
    running_at: int
    tier: int
    first: int
    gone: int


class Queue:
    """The bounds of one side's queue in `State.waiting`."""

    first: int
    last: int


class Totals:
    """Counts and sums over the requests, updated with every change.

    `clock`: decode steps so far. `running`: running requests; `decoding`: those of them that decode. `own_kv`: KV
    tokens that they hold and do not share. `sweeps`: number of the current sweep; `sweep_at`: how far it is.
    `next_dirty`: the group to check next for news. `gone`: requests in the queues that were taken back.

    `remaining_*`: the remaining work that the last complete sweep found, in seconds of compute, of memory reads, and of
    the compute of waiting prompts. `known_*`: the part of the waiting requests whose lengths are known. `next_*`: what
    the current sweep has found so far. `planned_share`: compute's share of the remaining work when the plan was made.
    `mean_answer`, `longest_answer`: output tokens to expect of the waiting requests. `right_share`: the share of the KV
    cache that the right side may hold. `left_work`: work per prompt token at the left end. `pending_*`: prompts that
    are being computed; `right_pending`: their tokens on the right side. `soon`: 1 if
    the next step admits, even if little fits, or else 0.
    """

    clock: int
    running: int
    decoding: int
    own_kv: int
    sweeps: int
    sweep_at: int
    next_dirty: int
    gone: int
    remaining_compute_s: float
    remaining_memory_s: float
    remaining_prompts_s: float
    known_compute_s: float
    known_memory_s: float
    known_prompts_s: float
    known_outputs: float
    next_compute_s: float
    next_memory_s: float
    planned_share: float
    mean_answer: float
    longest_answer: float
    right_share: float
    right_pending: float
    left_work: float
    pending_tokens: float
    pending_work: float
    soon: int


class Footprint:
    """KV tokens at one point ahead: of all running requests, their variance, of the right side, and in doubt."""

    kv: float
    variance: float
    right_kv: float
    doubt: float


class Unknown:
    """Waiting requests of unknown length: their number, their prompt tokens, and the work of computing these."""

    requests: float
    prompt: float
    work: float


class State(NamedTuple):
    """Everything that the scan knows, in arrays and records that change in place.

    `waiting`: both queues, int64 [2, places]; `queues`: where each begins and ends. `running`: the admitted requests.
    `admitted`: those that the last step admitted.

    By group: `tree`; `seen`, the lengths seen so far; `outlook`, what to expect by length bucket (see lengths.py);
    `holds`, the probability that an answer still runs at each of `AHEAD`, float64 [groups, BUCKETS, AHEAD]; `doubt`, by
    how much these may be wrong for all requests alike; `unknown`, the waiting requests of unknown length; `dirty`,
    whether the group has news.

    By `AHEAD`: `footprint`, and `footprint_next`, which the current sweep builds. `totals`: one record.
    """

    requests: Records[Request]
    waiting: Column
    queues: Records[Queue]
    running: Column
    admitted: Column
    tree: GroupTree
    seen: Seen
    outlook: Outlook
    holds: Floats
    doubt: Floats
    dirty: NDArray[np.bool_]
    unknown: Records[Unknown]
    footprint: Records[Footprint]
    footprint_next: Records[Footprint]
    totals: Records[Totals]
    costs: StepCosts


def prompt_work(backlog: Backlog, costs: StepCosts) -> Floats:
    """Return the work of computing each request's fresh tokens, with attention to all before, in tokens of GEMM."""
    end, fresh = backlog.prompt.astype(np.float64), backlog.fresh.astype(np.float64)
    return fresh + (end**2 - (end - fresh) ** 2) * costs.quadratic_s / costs.gemm_s


def new_state(backlog: Backlog, costs: StepCosts) -> State:
    """Create the state before the first step; outlooks and remaining work are still to be worked out."""
    count, groups = len(backlog.prompt), len(backlog.groups)
    requests = new_records(Request, count, np.int32)
    rows: Any = requests
    rows["prompt"], rows["fresh"], rows["known"] = backlog.prompt, backlog.fresh, backlog.known
    rows["work"] = np.round(prompt_work(backlog, costs))
    rows["cap"], rows["group"] = np.minimum(backlog.caps, LONGEST), backlog.groups.of
    rows["counted"] = 0 if backlog.counted is None else backlog.counted
    rows["first"] = 0 if backlog.first is None else backlog.first
    rows["tier"] = ORDINARY if backlog.tier is None else backlog.tier
    rows["started"], rows["swept"] = NOT_STARTED, -1
    waiting = np.full((2, 2 * count + 1), NO_REQUEST, dtype=np.int64)
    queues, totals = new_records(Queue, 2), new_records(Totals, 1)
    for side, queue in ((LEFT, backlog.left), (RIGHT, backlog.right)):
        # In front there is room for every request once, because retracted requests return there.
        queues[side].first, queues[side].last = count, count + len(queue)
        waiting[side, count : count + len(queue)] = queue
    return State(
        requests=requests,
        waiting=waiting,
        queues=queues,
        running=np.zeros(count, dtype=np.int64),
        admitted=np.zeros(count, dtype=np.int64),
        tree=GroupTree.of(backlog.groups, backlog.caps),
        seen=backlog.seen.copy(),
        outlook=Outlook.blank(groups),
        holds=np.zeros((groups, BUCKETS, len(AHEAD))),
        doubt=np.zeros(groups),
        dirty=np.zeros(groups, dtype=np.bool_),
        unknown=new_records(Unknown, groups),
        footprint=new_records(Footprint, len(AHEAD)),
        footprint_next=new_records(Footprint, len(AHEAD)),
        totals=totals,
        costs=costs.normalize(),
    )
