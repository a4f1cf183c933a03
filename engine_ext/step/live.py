"""Runs the dual scan of an engine whose requests come and go, and plans again as they do, with all that was learned.

The caller chooses the requests' keys. A plan covers the waiting requests and, for what they tell about similar
requests, the running ones and those that ended last. Planning takes about 4 microseconds per request, so it is not done
in every step, and steps continue with the last plan while it is done (`backlog.py`). The scan plans again when the
backlog has grown by a quarter, when new requests have waited long enough, when a deadline comes near, when the ratio of
the remaining work has drifted, or when several times as many answers have ended as the plan knew.
"""

import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from engine_ext.arrays import Bools, Column
from engine_ext.costs.cost import CostModel
from engine_ext.plan.buckets import LONGEST
from engine_ext.plan.lengths import UNKNOWN
from engine_ext.plan.memory import Profile
from engine_ext.plan.prompts import TokenIds
from engine_ext.plan.tuning import SAMPLE
from engine_ext.scan.backlog import Added, AtOnce, Executor, Plan, Planner, Running, Told
from engine_ext.scan.decide import DualScan
from engine_ext.scan.events import (
    ADMITTED,
    DROPPED,
    FINISHED,
    FORGOTTEN,
    LEFT_OUT,
    PREFILLED,
    PUT_BACK,
    RETRACTED,
    SET_ASIDE,
    TAKEN_BACK,
    TICK,
    Event,
    table_of,
)
from engine_ext.scan.members import Member, Members
from engine_ext.scan.projects import NOBODY, Owner
from engine_ext.scan.replan import answers_before_next, is_outdated
from engine_ext.scan.slowness import Slowness, step_s
from engine_ext.scan.state import NO_REQUEST, Backlog, State, StepCosts
from engine_ext.scan.sweep import right_share
from engine_ext.scan.tuning import FEWEST_CHANGES, PATIENCE
from engine_ext.scan.twins import Twins
from engine_ext.scan.untold import Untold
from engine_ext.step.decide import After, decide
from engine_ext.step.memory import Memory
from engine_ext.step.plan import StepPlan
from engine_ext.step.tuning import MOST_EVENTS, MOST_REFUSED, REMEMBERED
from engine_ext.step.view import View

MOVES_HEADS = {PUT_BACK, RETRACTED, TAKEN_BACK, SET_ASIDE}


_NOWHERE: Column = np.zeros(0, dtype=np.int64)


@dataclass(slots=True)
class LiveScan:
    """The scan of one engine; not thread-safe.

    `share`: share of the requests with unknown lengths to run first, as a sample. `cached`: returns how many prompt
    tokens of the waiting request with this key are in the engine's cache; it is called when a prefix might be computed
    twice. `executor`: makes the plans.
    """

    cost: CostModel
    costs: StepCosts
    share: float = SAMPLE
    cached: Callable[[int], int] = lambda key: 0
    executor: Executor = field(default_factory=AtOnce)
    plans: int = 0
    expected_cached: int = 0  # prompt tokens of admitted requests that each shares with the one before it at its end
    _members: Members = field(default_factory=Members)
    _twins: Twins = field(default_factory=Twins)
    _ended: deque[int] = field(default_factory=deque[int])  # numbers of requests that are remembered
    _planner: Planner = field(init=False)
    _making: "Future[Plan] | None" = None
    _plan: Plan | None = None
    _scan: DualScan = field(init=False)  # of nothing until the first plan
    _after: After | None = None  # what the scan said last; None if it follows another plan since
    _heads_moved: bool = False  # since then
    _added: list[Added] = field(default_factory=list[Added])
    _events: list[Event] = field(default_factory=list[Event])  # since the last plan was begun; requests by number
    _untold: Untold = field(default_factory=Untold)  # what the scan does not know yet
    _new: int = 0  # waiting requests that the scan does not have
    _newest: int = 0  # those of them that the plan that is being made does not have either
    _begun: int = 0  # plans
    _learned: int = 0  # answers ended since the plan was begun; `_needed` of them lead to another plan
    _needed: int = 0
    _decisions: int = 0
    _now: float = 0.0
    _look_again: float = math.inf
    _slowness: Slowness = field(default_factory=Slowness)

    def __post_init__(self) -> None:
        self._planner = Planner(self.cost, self.share)
        self._scan = DualScan.of(Backlog.of_nothing(), self.costs)

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        self._tell()
        return self._new + self._scan.waiting

    def add(
        self,
        key: int,
        prompt: TokenIds,
        cap: int,
        known: int = UNKNOWN,
        kind: int = 0,
        due: float = math.inf,
        apart: bool = False,
        profile: Profile | None = None,
        owner: Owner = NOBODY,
    ) -> None:
        """Add a waiting request; `kind` is equal for requests that have more in common than their prompts.

        `due`: when it must have ended, in seconds of the clock that `decide` is told. `apart`: whether it had better
        run beside others like it alone, as requests do with which the engine does not mix prompts and decodes.
        `profile`: the lengths of earlier answers to requests like it. `owner`: whose it is.
        """
        member = self._members.add(key, prompt, known)
        self._added.append(Added(member.number, prompt, min(cap, LONGEST), known, kind, due, apart, profile, owner))
        self._wait_for_plan(member)

    def take_back(self, key: int) -> None:
        """Remove a waiting request, which will not run."""
        member = self._members.remove(key)
        is_in_no_plan = member.from_plan > self._begun
        if self._place(member) < 0:
            self._new -= 1
            self._newest -= is_in_no_plan
        self._note(FORGOTTEN if is_in_no_plan else TAKEN_BACK, member)
        self._members.free(member.number)

    def decide(
        self, memory: Memory, view: View, rests: Bools, now: float = 0.0, may_follow: bool = True
    ) -> tuple[StepPlan, list[int]]:
        """Decide the next step; see the function `decide` in decide.py. Returns its plan and the keys to admit.

        `now`: seconds of any steady clock. `may_follow`: whether to follow a plan that is ready. All ranks of an engine
        must do so in the same step.
        """
        self._decisions += 1
        self._now = now
        self._slowness.measure(now)
        self._set_bursts(not view.mixes)
        self._tell()
        # Before another one begins: whether that is ready at once differs between ranks, which have not agreed on it.
        if self._making is not None and may_follow and self._making.done():
            self._follow(self._making.result())
        if self._making is None and self._is_due():
            self._begin_plan()
        if self._making is not None:
            is_idle = view.decoding == view.chunk.left == view.online.tokens == 0
            if (is_idle and not self._scan.waiting) or isinstance(self.executor, AtOnce):
                self._follow(self._making.result())
        if self._making is not None:
            self._events.append((TICK, -1, view.decoded))
        plan, self._after = decide(self._scan.state, memory, view, rests)
        self._heads_moved = False
        admitted = self._without_twins(self._scan.state.admitted[: plan.admitted].tolist())
        self._slowness.expect(self._expected_s(view, plan, admitted, rests))
        return plan, admitted

    def _expected_s(self, view: View, plan: StepPlan, admitted: list[int], rests: Bools) -> float:
        """Return the seconds that the step should take by the cost model."""
        pending = (view.online.tokens if view.mixes else 0) + (view.chunk.left if view.chunk.is_ours else 0)
        prompts = min(plan.budget, pending + sum(len(self._members[key].prompt) for key in admitted))
        reads = view.reads - int(view.kv[rests].sum())
        return step_s(self.costs, prompts, view.decoding - plan.left_out, reads)

    def _set_bursts(self, bursts: bool) -> None:
        """Note whether a prefill stops decoding from here on; see `StepCosts`."""
        if bursts == self.costs.bursts:
            return
        self.costs = self.costs._replace(bursts=bursts)
        self._scan = self._with_costs(self._scan.state)

    def prefilled(self, key: int, stored: bool = True) -> None:
        """Note that a request's prompt is computed; `stored`: whether it is also in the cache, for others to use."""
        member = self._members[key]
        member.stored, member.before = stored, None
        self._note(PREFILLED, member)

    def stored(self, key: int) -> None:
        """Note that the prompt of a prefilled request is in the cache."""
        self._members[key].stored = True

    def left_out(self, key: int, steps: int) -> None:
        """Note that a request decodes again, which got no token in so many steps in which others did."""
        self._note(LEFT_OUT, self._members[key], steps)

    def finished(self, key: int, tokens: int) -> None:
        member = self._members.remove(key)
        self._note(FINISHED, member, tokens)
        self._learned += member.known == UNKNOWN
        self._ended.append(member.number)
        if len(self._ended) > REMEMBERED:
            forgotten = self._ended.popleft()
            self._events.append((FORGOTTEN, forgotten, 0))
            self._members.free(forgotten)

    def dropped(self, key: int, tokens: int) -> None:
        """Note that a running request was given up."""
        member = self._members.remove(key)
        self._note(DROPPED, member, tokens)
        self._members.free(member.number)

    def retracted(self, key: int, tokens: int) -> None:
        member = self._members[key]
        member.tokens, member.runs, member.stored = tokens, False, False
        self._note(RETRACTED, member, tokens)

    def put_back(self, key: int, refused: bool = False) -> None:
        """Note that the engine did not take a request that was just admitted.

        If the engine could take others but not this one (`refused`), it must not block its end: after some
        refusals it waits for the next plan.
        """
        member = self._members[key]
        member.runs = False
        member.refused += refused
        if member.tokens == 0:
            self.expected_cached -= self._shared(member)
        self._twins.put_back(member)
        if member.refused < MOST_REFUSED:
            self._note(PUT_BACK, member)
            return
        member.refused = 0
        self._note(SET_ASIDE, member)
        self._tell()
        assert self._plan is not None
        self._plan.places[member.number] = -1
        self._wait_for_plan(member)

    @property
    def is_ready(self) -> bool:
        """Whether a plan that was begun is ready to be followed, or none was begun."""
        return self._making is None or self._making.done()

    @property
    def remaining_s(self) -> tuple[float, float]:
        """The expected remaining seconds of compute and of memory reads."""
        return self._scan.remaining_s if self._members else (0.0, 0.0)

    @property
    def slowness(self) -> float:
        """Real seconds per second of the cost model."""
        return self._slowness.slowness

    @property
    def next_keys(self) -> list[int]:
        """Keys of the requests that the left and the right end admit next, if their own queues are not empty."""
        if self._after is None or self._heads_moved:
            self._tell()
            heads = self._scan.heads
        else:
            heads = self._after.left, self._after.right
        members = [self._at(head) for head in heads if head != NO_REQUEST]
        return [member.key for member in members if member is not None]

    @property
    def state(self) -> State:
        """What the scan knows now, for those who choose among its requests."""
        self._tell()
        return self._scan.state

    def key_of(self, place: int) -> int | None:
        """Return the key of the request with this number in `state`; None if it was taken back."""
        member = self._at(place)
        return None if member is None else member.key

    @property
    def kv_tokens(self) -> tuple[int, int]:
        """KV tokens that requests of the left end and of the right end hold, without the prefixes that they share."""
        return self._scan.kv_tokens if self._members else (0, 0)

    def _note(self, kind: int, member: Member, value: int = 0) -> None:
        event = (kind, member.number, value)
        self._heads_moved |= kind in MOVES_HEADS
        self._events.append(event)
        self._untold.add(event)

    def _tell(self) -> None:
        """Tell the scan what happened since it last decided."""
        if self._plan is not None and self._untold.events:
            self._scan.tell(table_of(self._untold.events, self._plan.places))
        self._untold.clear()

    def _wait_for_plan(self, member: Member) -> None:
        member.from_plan = self._begun + 1
        self._new += 1
        self._newest += 1

    def _place(self, member: Member) -> int:
        """Return the request's place in the plan, or -1."""
        places = self._plan.places if self._plan is not None else _NOWHERE
        return int(places[member.number]) if member.number < len(places) else -1

    def _at(self, place: int) -> Member | None:
        """Return the request at this place of the plan; None if it was taken back."""
        assert self._plan is not None
        return self._members.at(self._plan.numbers[place])

    def _shared(self, member: Member) -> int:
        """Return the prompt tokens that the request shares with the one before it at its end."""
        return len(member.prompt) - int(self._scan.state.requests[self._place(member)].fresh)

    def _is_due(self) -> bool:
        if self._now >= self._look_again or len(self._events) > MOST_EVENTS:
            return True
        planned = self._after.waiting if self._after else self._scan.waiting
        has_drifted = self._after is not None and self._after.has_drifted
        if is_outdated(planned, has_drifted, self._decisions, self._needed - self._learned):
            return True
        if self._new == 0:
            return False
        if planned == 0 or self._decisions >= PATIENCE:
            return True
        return self._new >= max(FEWEST_CHANGES, planned // 4)

    def _begin_plan(self) -> None:
        """Begin a plan of all requests as they are now."""
        running = Running.none()
        if self._plan is not None:
            running = Running.of(self._scan.state, self._plan.numbers)
        told = Told(self._added, self._events, running, self._now, self._slowness.slowness, self.costs)
        self._added, self._events = [], []
        self._newest, self._learned, self._begun = 0, 0, self._begun + 1
        self._members.plan_begins()
        self._making = self.executor.submit(self._planner.plan, told)

    def _with_costs(self, state: State) -> DualScan:
        """Return a scan with the costs of now, which may have changed since the state's plan was begun."""
        if state.costs.bursts != self.costs.bursts:
            state = state._replace(costs=self.costs.normalize())
            state.totals[0].right_share = right_share(state)
        return DualScan(state)

    def _follow(self, plan: Plan) -> None:
        """Follow this plan from here on, brought up to date with what happened since it was begun."""
        plan.state.totals[0].soon = self._scan.state.totals[0].soon
        self._plan, self._scan, self._making, self._after = plan, self._with_costs(plan.state), None, None
        self._scan.tell(table_of(self._events, plan.places))
        for kind, number, _ in self._events:
            if kind == SET_ASIDE:
                plan.places[number] = -1
        self._look_again, self._needed = plan.look_again, answers_before_next(plan.learned)
        self._new, self._decisions = self._newest, 0
        self._members.plan_is_followed()
        self.plans += 1

    def _without_twins(self, places: list[int]) -> list[int]:
        """Return the keys to admit now, without the requests whose prefix is still being computed for another one.

        These come when the prefix is in the cache.
        """
        scan = self._scan
        kept: list[int] = []
        later: list[int] = []
        self._twins.step_begins()
        for place in places:
            side, member = int(scan.state.requests[place].side), self._at(place)
            assert member is not None
            if self._twins.has_to_wait(member, side, self.cached):
                later.append(member.number)
                continue
            self._twins.admit(member, side)
            member.runs = True
            self._events.append((ADMITTED, member.number, side))
            if member.tokens == 0:
                self.expected_cached += self._shared(member)
            kept.append(member.key)
        # The scan has admitted them; a plan that is being made never hears of it.
        if places:
            assert self._plan is not None
            self._untold.hold(self._plan.numbers[places].tolist(), later)
        if later:
            self._heads_moved = True
            scan.come_soon()
        return kept
