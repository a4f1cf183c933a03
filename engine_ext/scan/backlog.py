"""Plans an engine's backlog beside its steps, in a thread of its own: a plan takes longer than many steps.

A `Planner` knows the requests from what it is told at the start of each plan: the ones that have come, and what
happened to those that it knows. It shares nothing with the scan that continues in the meantime.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from engine_ext.arrays import Bools, Column, Records, column, new_records
from engine_ext.costs.cost import CostModel
from engine_ext.plan.groups import group_requests
from engine_ext.plan.memory import Profile, Recall
from engine_ext.plan.prompts import Prompts, TokenIds
from engine_ext.plan.tree import build_tree
from engine_ext.plan.tuning import SAMPLE
from engine_ext.scan.events import (
    ADMITTED,
    DROPPED,
    FINISHED,
    FORGOTTEN,
    KINDS,
    LEFT_OUT,
    PREFILLED,
    PUT_BACK,
    RETRACTED,
    SET_ASIDE,
    TAKEN_BACK,
    TICK,
    Event,
)
from engine_ext.scan.footprint import output_tokens
from engine_ext.scan.projects import NOT_AHEAD, Owner, ProjectTimes
from engine_ext.scan.replan import Progress, plan_backlog
from engine_ext.scan.state import State, StepCosts
from engine_ext.scan.tiers import Urgency
from engine_ext.scan.tuning import LONGEST_WAIT_S, MOST_OVERTAKEN

FREE, WAITS, RUNS, ENDED = range(4)

AFTER = np.zeros(KINDS, dtype=np.int64)
AFTER[[ADMITTED, PREFILLED, LEFT_OUT]] = RUNS
AFTER[[RETRACTED, PUT_BACK, SET_ASIDE]] = WAITS
AFTER[FINISHED] = ENDED
AFTER[[DROPPED, TAKEN_BACK, FORGOTTEN]] = FREE
HAS_TOKENS = np.isin(np.arange(KINDS), [FINISHED, DROPPED, RETRACTED])


class Added(NamedTuple):
    """A request that has come; `number` is its own for as long as anything is known of it. See `LiveScan.add`."""

    number: int
    prompt: TokenIds
    cap: int
    known: int
    kind: int
    due: float
    apart: bool
    profile: Profile | None
    owner: Owner


class Running(NamedTuple):
    """What a scan knows of the running requests, as int64 columns: numbers, output tokens, fresh tokens and sides."""

    numbers: Column
    tokens: Column
    fresh: Column
    sides: Column

    @classmethod
    def of(cls, state: State, numbers: Column) -> "Running":
        """Return the running requests of this state; `numbers`: the number of each of its requests."""
        running = state.running[: state.totals[0].running]
        fresh, sides = column(state.requests, "fresh")[running], column(state.requests, "side")[running]
        return cls(numbers[running], output_tokens(state, running), fresh.astype(np.int64), sides.astype(np.int64))

    @classmethod
    def none(cls) -> "Running":
        return cls(*np.zeros((4, 0), dtype=np.int64))


class Told(NamedTuple):
    """What a planner is told when a plan begins: what happened since the last one, and how things stand.

    `now`: seconds of the engine's clock. `slowness`: real seconds per second of the cost model.
    """

    added: list[Added]
    events: list[Event]
    running: Running
    now: float
    slowness: float
    costs: StepCosts


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan of the requests as they were when it was begun.

    `numbers`: the number of each request of `state`. `places`: by number, the request in `state`, or -1. `learned`:
    answers that it knew. `look_again`: when a deadline may be threatened that is not yet, by the engine's clock.
    """

    state: State
    numbers: Column
    places: Column
    learned: int
    look_again: float


class Executor(Protocol):
    """Runs one plan after the other, in a thread or at once."""

    def submit(self, fn: Callable[..., Plan], /, *given: Any) -> "Future[Plan]": ...


class AtOnce:
    """Makes a plan when it is asked for, so that the same events always lead to the same steps."""

    def submit(self, fn: Callable[..., Plan], /, *given: Any) -> "Future[Plan]":
        made: Future[Plan] = Future()
        made.set_result(fn(*given))
        return made


class Row:
    """A request as the planner knows it; see `Added`.

    `came`: its number in the order in which requests came. `tokens`: output tokens so far. `status`: FREE, WAITS, RUNS
    or ENDED. `prefilled`: 1 if its prompt is computed. `overtaken`: how many requests that came later were admitted
    before it; `since`: since when there are any. `fresh`: see `Ends`. `charged_s`: the work that was counted for its
    project.
    """

    came: int
    cap: int
    known: int
    kind: int
    tokens: int
    status: int
    prefilled: int
    overtaken: int
    apart: int
    project: int
    fresh: int
    due: float
    since: float
    weight: float
    charged_s: float


@dataclass(slots=True)
class Planner:
    """Knows all requests of an engine, and plans those that wait. `share`: see `plan_backlog`."""

    cost: CostModel
    share: float = SAMPLE
    generator: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    _rows: Records[Row] = field(default_factory=lambda: new_records(Row, 0))
    _prompts: list[TokenIds] = field(default_factory=list[TokenIds])
    _profiles: list[Profile | None] = field(default_factory=list["Profile | None"])
    _projects: ProjectTimes = field(default_factory=ProjectTimes)
    _came: int = 0

    def plan(self, told: Told) -> Plan:
        """Plan all requests that wait; those that run, and those that have ended, say what to expect of them."""
        self._add(told.added)
        rows: Any = self._rows
        self._note(told)
        numbers = np.flatnonzero(rows["status"] != FREE)
        numbers = numbers[np.argsort(rows["came"][numbers])]
        status = rows["status"][numbers]
        runs, ended = status == RUNS, status == ENDED
        fresh, sides = np.zeros((2, len(rows)), dtype=np.int64)
        fresh[told.running.numbers], sides[told.running.numbers] = told.running.fresh, told.running.sides
        tree = build_tree(_joined([self._prompts[number] for number in numbers.tolist()]))
        progress = Progress(
            rows["cap"][numbers],
            rows["known"][numbers],
            np.zeros_like(runs),
            rows["tokens"][numbers],
            runs,
            runs & (rows["prefilled"][numbers] == 1),
            ended,
            fresh[numbers],
            sides[numbers],
            self._urgency(numbers, told),
            Recall.of([self._profiles[number] for number in numbers.tolist()]),
        )
        groups = group_requests(tree, rows["kind"][numbers])
        replanned = plan_backlog(tree, groups, progress, self.cost, told.costs, self.generator, self.share)
        places = np.full(len(rows), -1, dtype=np.int64)
        places[numbers] = np.arange(len(numbers))
        rows["fresh"][numbers] = column(replanned.state.requests, "fresh")[: len(numbers)]
        return Plan(replanned.state, numbers, places, progress.learned, told.now + replanned.look_again_s)

    def _add(self, added: list[Added]) -> None:
        if not added:
            return
        numbers = np.array([each.number for each in added])
        missing = int(numbers.max()) + 1 - len(self._rows)
        if missing > 0:
            more: Any = new_records(Row, max(missing, len(self._rows)))
            self._rows = np.concatenate([self._rows, more])  # type: ignore[list-item] # records are an array
            self._prompts += [_NOBODY] * len(more)
            self._profiles += [None] * len(more)
        rows: Any = self._rows
        for name in ("cap", "known", "kind", "due", "apart"):
            rows[name][numbers] = [getattr(each, name) for each in added]
        rows["project"][numbers] = [each.owner.project for each in added]
        rows["weight"][numbers] = [each.owner.weight for each in added]
        rows["came"][numbers] = self._came + np.arange(len(added))
        rows["status"][numbers], rows["since"][numbers] = WAITS, np.inf
        for name in ("tokens", "prefilled", "overtaken", "fresh", "charged_s"):
            rows[name][numbers] = 0
        for each in added:
            self._prompts[each.number], self._profiles[each.number] = each.prompt, each.profile
        self._came += len(added)

    def _note(self, told: Told) -> None:
        """Note what happened to the requests, and which of them were overtaken."""
        rows: Any = self._rows
        events = np.array(told.events, dtype=np.int64).reshape(-1, 3)
        kinds, numbers, values = events[events[:, 0] != TICK].T
        # The last of several events of a request is what counts: NumPy assigns them in their order.
        rows["status"][numbers] = AFTER[kinds]
        rows["prefilled"][numbers] = (kinds == PREFILLED) | (kinds == LEFT_OUT)
        counts = HAS_TOKENS[kinds]
        rows["tokens"][numbers[counts]] = values[counts]
        rows["tokens"][told.running.numbers] = told.running.tokens
        self._charge(np.union1d(numbers, told.running.numbers), numbers[kinds == DROPPED])
        for number in numbers[AFTER[kinds] == FREE].tolist():
            self._prompts[number], self._profiles[number] = _NOBODY, None
        overtakers = np.sort(rows["came"][numbers[kinds == ADMITTED]])
        later = len(overtakers) - np.searchsorted(overtakers, rows["came"], side="right")
        behind = (later > 0) & (rows["status"] == WAITS)
        rows["overtaken"][behind] += later[behind]
        rows["since"][behind] = np.minimum(rows["since"][behind], told.now)

    def _charge(self, numbers: Column, dropped: Column) -> None:
        """Count for their projects what these requests took since they were counted last.

        A prompt counts whole as soon as it runs, also if it is `dropped` before it is computed.
        """
        rows: Any = self._rows
        runs = (rows["status"][numbers] == RUNS) | np.isin(numbers, dropped)
        begun = numbers[(rows["tokens"][numbers] > 0) | (rows["prefilled"][numbers] == 1) | runs]
        prompt = np.array([len(self._prompts[number]) for number in begun.tolist()], dtype=np.int64)
        tokens, cached = rows["tokens"][begun], np.maximum(prompt - rows["fresh"][begun], 0)
        took_s = self.cost.compute_s(prompt, tokens) - self.cost.saved_s(cached) + self.cost.memory_s(prompt, tokens)
        more_s = np.maximum(took_s - rows["charged_s"][begun], 0.0)  # a retraction takes back what was counted
        self._projects.charge(rows["project"][begun], more_s / rows["weight"][begun])
        rows["charged_s"][begun] += more_s

    def _urgency(self, numbers: Column, told: Told) -> Urgency:
        """Return the deadlines of these requests, and which of them have waited for too long.

        No request is overtaken by more than MOST_OVERTAKEN others of its urgency and what two plans admit, nor for
        longer than LONGEST_WAIT_S.
        """
        rows: Any = self._rows
        overtaken, since = rows["overtaken"][numbers], rows["since"][numbers]
        aged: Bools = (overtaken >= MOST_OVERTAKEN) | (told.now - since >= LONGEST_WAIT_S)
        ahead, waits = np.full(len(numbers), NOT_AHEAD), rows["status"][numbers] == WAITS
        ahead[waits] = self._projects.ahead(rows["project"][numbers[waits]], told.slowness)
        return Urgency(rows["due"][numbers] - told.now, aged, told.slowness, rows["apart"][numbers], ahead)


_NOBODY: TokenIds = np.zeros(0, dtype=np.uint32)


def _joined(prompts: list[TokenIds]) -> Prompts:
    starts = np.zeros(len(prompts) + 1, dtype=np.int64)
    np.cumsum([len(prompt) for prompt in prompts], out=starts[1:])
    return Prompts(np.concatenate(prompts) if prompts else np.zeros(0, dtype=np.uint32), starts)
