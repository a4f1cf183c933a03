"""What the dual scan knows while an engine runs, as arrays that change in place."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_ext.costs.cost import CostModel
from engine_ext.plan.groups import Groups
from engine_ext.plan.lengths import BUCKETS, LONGEST, Outlook, Seen, group_caps
from engine_ext.plan.tree import Column

Floats = NDArray[np.float64]

# Steps from now at which the footprint is held: two to an octave; nothing is foreseen beyond the last.
AHEAD = np.array([0, 16, *(step << k for k in range(13) for step in (24, 32))], dtype=np.int64)
# Between one and the next what runs goes on growing; by how much until half-way.
GROWTH = np.array([0, *((AHEAD[2:] - AHEAD[1:-1]) // 2), 0], dtype=np.int64)
BURSTS_MARGIN = 0.5  # of the margin
ALIGNMENT = 128  # tokens; step sizes are multiples, as GEMM tiles are (A.2)
NO_REQUEST = -1
NOT_STARTED = -(1 << 30)
LEFT, RIGHT = 0, 1

# Columns of State.requests
PROMPT, FRESH, WORK, KNOWN, CAP, GROUP, SIDE, STARTED, COUNTED, SWEPT, PLACE = range(11)
# Places in State.counts
(
    CLOCK,
    RUNNING,
    DECODING,
    OWN_KV,
    SWEEPS,
    SWEEP_AT,
    LEFT_FIRST,
    LEFT_LAST,
    RIGHT_FIRST,
    RIGHT_LAST,
    NEXT_DIRTY,
    SAMPLE_LAST,
) = range(12)
# Places in State.sums
(
    COMPUTE_LEFT,
    MEMORY_LEFT,
    RIGHT_SHARE,
    LEFT_WORK,
    RIGHT_PENDING,
    PENDING_TOKENS,
    PENDING_WORK,
    KNOWN_COMPUTE,
    KNOWN_MEMORY,
    NEXT_COMPUTE,
    NEXT_MEMORY,
    OWED,
    PLANNED,
    KNOWN_PROMPTS,
    KNOWN_OUTPUTS,
    PROMPTS_LEFT,
    AN_ANSWER,
    LONGEST_ANSWER,
) = range(18)
# Places in State.machine
GEMM_S, READ_S, WEIGHTS_S, CAPACITY, MOST_TOKENS, MARGIN, BURSTS = range(7)
# Columns of State.footprint
ALL, VARIANCE, OF_RIGHT, DOUBT = range(4)


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What a step costs: seconds per token of GEMM, per KV token read, and for reading the weights once.

    `capacity`: tokens of KV cache; `most_tokens`: the largest step; `margin`: standard deviations of the projected
    footprint to keep free; `quadratic_s`: seconds of prefill attention, times end^2 - begin^2 of a chunk; `bursts`: a
    prefill stops decoding, so prompt tokens are saved up for whole steps of them, and less is kept free: prompts may
    wait where nothing overlaps.
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
            cost.weights_s,
            capacity,
            most_tokens,
            quadratic_s=cost.quadratic_s,
            bursts=bursts,
        )


@dataclass(frozen=True, slots=True)
class Backlog:
    """Requests to run, int64 by request: `prompt` tokens, `fresh` ones (not shared with the one before it at its end).

    `known` output tokens or UNKNOWN, `caps` (max_tokens). `left` and `right`: requests in the order in which each end
    gives them, each request at most once; the `first` of `left` come before all of `right`. `counted`: output tokens
    that each has got already, which `seen` holds.
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
    first: int = 0


class State(NamedTuple):
    """Everything the scan knows; arrays that change in place.

    `requests`: int32 [requests, 11], a row that fits a cache line: prompt tokens, fresh ones (not shared with the
    request before it in the scan), the work of these in tokens of GEMM, known output or UNKNOWN, cap, group, side it
    was admitted from, the clock at its first output token or NOT_STARTED, output tokens counted in `entered`, the last
    sweep that looked at it, place in `running`. `waiting` holds both queues, [2, places]; `running` the admitted
    requests.

    By group: `parent`, `leaning`, `caps`, by length bucket too what was seen and what to expect (lengths.py), and
    `holds`, the chance to run still at each of `AHEAD`, and `doubt`, by how much these may be wrong for all alike.
    `held_back` sums what waits with unknown length, [groups, 3]: requests, prompt tokens, work. `dirty` groups have
    news.

    By `AHEAD`: the KV tokens that all that run will hold, their variance, those of the right side, and those in doubt,
    [AHEAD, 4]; `footprint_next` is the one that the sweep under way builds.
    """

    requests: NDArray[np.int32]
    waiting: Column
    running: Column
    parent: Column
    leaning: Floats
    caps: Column
    entered: Floats
    ended: Floats
    reached: Floats
    hazard: Floats
    where: Floats
    stays: Floats
    rest: Floats
    rest_squared: Floats
    holds: Floats
    doubt: Floats
    dirty: NDArray[np.bool_]
    held_back: Floats
    footprint: Floats
    footprint_next: Floats
    admitted: Column
    counts: Column
    sums: Floats
    machine: Floats


def prompt_work(backlog: Backlog, costs: StepCosts) -> Floats:
    """Computing each request's fresh tokens, attention to all before them included, in tokens of GEMM."""
    end, fresh = backlog.prompt.astype(np.float64), backlog.fresh.astype(np.float64)
    return fresh + (end**2 - (end - fresh) ** 2) * costs.quadratic_s / costs.gemm_s


def new_state(backlog: Backlog, costs: StepCosts) -> State:
    """The state before the first step; outlooks and remaining work are still to be worked out."""
    requests, groups = len(backlog.prompt), len(backlog.groups)
    outlook = Outlook.blank(groups)
    queues = np.full((2, 2 * requests + 1), NO_REQUEST, dtype=np.int64)
    counts = np.zeros(12, dtype=np.int64)
    # Retracted requests go in front: there is room for every request once.
    counts[[LEFT_FIRST, RIGHT_FIRST]] = requests
    counts[[LEFT_LAST, RIGHT_LAST]] = requests + len(backlog.left), requests + len(backlog.right)
    counts[SAMPLE_LAST] = requests + backlog.first
    queues[LEFT, counts[LEFT_FIRST] : counts[LEFT_LAST]] = backlog.left
    queues[RIGHT, counts[RIGHT_FIRST] : counts[RIGHT_LAST]] = backlog.right
    rows = np.zeros((requests, 11), dtype=np.int32)
    rows[:, PROMPT], rows[:, FRESH], rows[:, KNOWN] = backlog.prompt, backlog.fresh, backlog.known
    rows[:, WORK] = np.round(prompt_work(backlog, costs))
    rows[:, CAP], rows[:, GROUP] = np.minimum(backlog.caps, LONGEST), backlog.groups.of
    rows[:, COUNTED] = 0 if backlog.counted is None else backlog.counted
    rows[:, STARTED], rows[:, SWEPT] = NOT_STARTED, -1
    return State(
        requests=rows,
        waiting=queues,
        running=np.zeros(requests, dtype=np.int64),
        parent=backlog.groups.parent.copy(),
        leaning=backlog.groups.leaning.copy(),
        caps=group_caps(backlog.groups, backlog.caps),
        entered=backlog.seen.entered.copy(),
        ended=backlog.seen.ended.copy(),
        reached=backlog.seen.reached.copy(),
        hazard=outlook.hazard,
        where=outlook.place,
        stays=outlook.stays,
        rest=outlook.rest,
        rest_squared=outlook.rest_squared,
        holds=np.zeros((groups, BUCKETS, len(AHEAD))),
        doubt=np.zeros(groups),
        dirty=np.zeros(groups, dtype=np.bool_),
        held_back=np.zeros((groups, 3)),
        footprint=np.zeros((len(AHEAD), 4)),
        footprint_next=np.zeros((len(AHEAD), 4)),
        admitted=np.zeros(requests, dtype=np.int64),
        counts=counts,
        sums=np.zeros(LONGEST_ANSWER + 1),
        machine=np.array(
            [
                costs.gemm_s,
                costs.read_s,
                costs.weights_s,
                costs.capacity,
                costs.most_tokens,
                BURSTS_MARGIN * costs.margin if costs.bursts else costs.margin,
                float(costs.bursts),
            ]
        ),
    )
