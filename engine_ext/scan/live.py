"""Runs the dual scan of an engine whose requests come and go, and plans again as they do, with all that was learned.

The caller chooses the requests' keys. A plan covers the waiting requests and, for what they tell about similar
requests, the running ones and those that ended last. Planning costs about 4 microseconds per request, so it is not done
in every step. The scan plans again when the backlog has grown by a quarter, when new requests have waited long enough,
when a deadline comes near, when the ratio of the remaining work has drifted, or when several times as many answers
have ended as the plan knew.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from engine_ext.arrays import Bools, column
from engine_ext.costs.cost import CostModel
from engine_ext.plan.groups import group_requests
from engine_ext.plan.lengths import LONGEST, UNKNOWN
from engine_ext.plan.prompts import Prompts, TokenIds
from engine_ext.plan.sample import SHARE
from engine_ext.plan.tree import build_tree, common_prefix
from engine_ext.scan.decide import DualScan
from engine_ext.scan.footprint import output_tokens
from engine_ext.scan.replan import FEWEST, PATIENCE, Progress, answers_before_next, is_outdated, plan_backlog
from engine_ext.scan.slowness import Slowness, step_s
from engine_ext.scan.state import NO_REQUEST, StepCosts
from engine_ext.scan.tiers import Urgency

REMEMBERED = 4096  # ended requests that are kept to estimate similar ones
PAGE = 16  # tokens; a shared prefix that is longer than this is worth waiting a step for
MOST_OVERTAKEN = 4096  # requests that came later and may go before one of the same urgency
LONGEST_WAIT_S = 1800.0  # for which requests that came later may go before it
MOST_REFUSED = 3  # times that the engine may refuse the request that an end admits first


@dataclass(slots=True, eq=False)
class _Member:
    """A request that waits, runs or has ended.

    `due`: when it must have ended, by the engine's clock. `came`: its number in the order in which requests came.
    `tokens`: output tokens so far. `place`: its index in the plan, or -1. `overtaken`: how many requests that came
    later were admitted before it; `since`: since when there are any. `refused`: how often the engine did not take it.
    """

    prompt: TokenIds
    cap: int
    known: int
    kind: int
    due: float
    came: int
    tokens: int = 0
    place: int = -1
    runs: bool = False
    prefilled: bool = False
    stored: bool = False
    ready: int = 0  # prompt tokens that were in the cache at its admission, as far as is known
    before: "_Member | None" = None  # the request that its end admitted before it
    overtaken: int = 0
    since: float = math.inf
    refused: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """The decision for one step.

    `budget`: prompt tokens to compute, those of requests in prefill first. `admitted`: keys of the requests to admit,
    in this order.
    """

    budget: int
    admitted: list[int]


NOTHING = Step(0, [])


@dataclass(slots=True)
class LiveScan:
    """The scan of one engine; not thread-safe.

    `share`: share of the requests with unknown lengths to run first, as a sample. `cached`: returns how many prompt
    tokens of the waiting request with this key are in the engine's cache; it is called when a prefix might be computed
    twice.
    """

    cost: CostModel
    costs: StepCosts
    share: float = SHARE
    cached: Callable[[int], int] = lambda key: 0
    generator: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    plans: int = 0
    expected_cached: int = 0  # prompt tokens of admitted requests that each shares with the one before it at its end
    _members: dict[int, _Member] = field(default_factory=dict[int, _Member])
    _keys: list[int] = field(default_factory=list[int])
    _ended: "deque[_Member]" = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _scan: DualScan | None = None
    _new: int = 0
    _learned: int = 0  # answers ended since the plan was made; `_needed` of them lead to another plan
    _needed: int = 0
    _decisions: int = 0
    _computing: list[_Member] = field(default_factory=list[_Member])  # admitted, prompts not yet in the cache
    _latest: "list[_Member | None]" = field(default_factory=lambda: [None, None])  # that each end admitted last
    _came: int = 0
    _overtakers: list[int] = field(default_factory=list[int])  # `came` of those admitted since the plan was made
    _now: float = 0.0
    _look_again: float = math.inf
    _slowness: Slowness = field(default_factory=Slowness)

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return self._new + (self._scan.waiting if self._scan else 0)

    def add(
        self, key: int, prompt: TokenIds, cap: int, known: int = UNKNOWN, kind: int = 0, due: float = math.inf
    ) -> None:
        """Add a waiting request; `kind` is equal for requests that have more in common than their prompts.

        `due`: when it must have ended, in seconds of the clock that `decide` is told.
        """
        self._members[key] = _Member(prompt, min(cap, LONGEST), known, kind, due, self._came)
        self._came += 1
        self._new += 1

    def take_back(self, key: int) -> None:
        """Remove a waiting request, which will not run."""
        member = self._members.pop(key)
        if member.place < 0:
            self._new -= 1
        else:
            self._of(member).take_back(member.place)
            self._keys[member.place] = -1

    def decide(
        self, used_kv: int, decoding_kv: int, decoding: int, pending: int, decoded: int, slots: int, now: float = 0.0
    ) -> Step:
        """Decide the next step; see the function `decide` in scan/decide.py. `now`: seconds of any steady clock."""
        self._decisions += 1
        self._now = now
        self._slowness.measure(now)
        if self._is_due():
            self._plan()
        if self._scan is None:
            return NOTHING
        found = self._scan.decide(used_kv, decoding_kv, decoding, pending, decoded, slots)
        admitted = self._without_twins(found.admitted.tolist())
        prompts = min(found.budget, pending + sum(len(self._members[key].prompt) for key in admitted))
        self._slowness.expect(step_s(self.costs, prompts, decoding, decoding_kv))
        return Step(found.budget, admitted)

    def prefilled(self, key: int, stored: bool = True) -> None:
        """Note that a request's prompt is computed; `stored`: whether it is also in the cache, for others to use."""
        member = self._members[key]
        member.prefilled, member.stored, member.before = True, stored, None
        self._of(member).prefilled(member.place)

    def stored(self, key: int) -> None:
        """Note that the prompt of a prefilled request is in the cache."""
        self._members[key].stored = True

    def finished(self, key: int, tokens: int) -> None:
        member = self._members.pop(key)
        self._of(member).finished(member.place, tokens)
        member.tokens, member.runs = tokens, False
        self._ended.append(member)
        self._learned += member.known == UNKNOWN

    def dropped(self, key: int, tokens: int) -> None:
        """Note that a running request was given up."""
        member = self._members.pop(key)
        member.runs = False
        self._of(member).dropped(member.place, tokens)

    def retracted(self, key: int, tokens: int) -> None:
        member = self._members[key]
        member.tokens, member.runs, member.prefilled, member.stored = tokens, False, False, False
        self._of(member).retracted(member.place, tokens)

    def put_back(self, key: int, refused: bool = False) -> None:
        """Note that the engine did not take a request that was just admitted.

        If the engine could take others but not this one (`refused`), it must not block its end: after some
        refusals it waits for the next plan.
        """
        member = self._members[key]
        member.runs = False
        member.refused += refused
        if member.tokens == 0:
            scan = self._of(member)
            self.expected_cached -= len(member.prompt) - int(scan.state.requests[member.place].fresh)
        if member in self._latest:
            self._latest[self._latest.index(member)] = member.before
        if member.refused < MOST_REFUSED:
            self._of(member).put_back(member.place)
            return
        self._of(member).withdraw(member.place)
        self._keys[member.place] = -1
        member.place, member.refused = -1, 0
        self._new += 1

    @property
    def remaining_s(self) -> tuple[float, float]:
        """The expected remaining seconds of compute and of memory reads."""
        return self._scan.remaining_s if self._scan and self._members else (0.0, 0.0)

    @property
    def slowness(self) -> float:
        """Real seconds per second of the cost model."""
        return self._slowness.slowness

    @property
    def next_keys(self) -> list[int]:
        """Keys of the requests that the left and the right end admit next, if their own queues are not empty."""
        heads = self._scan.heads if self._scan else ()
        return [self._keys[head] for head in heads if head != NO_REQUEST and self._keys[head] >= 0]

    @property
    def kv_tokens(self) -> tuple[int, int]:
        """KV tokens that requests of the left end and of the right end hold, without the prefixes that they share."""
        return self._scan.kv_tokens if self._scan and self._members else (0, 0)

    def _member(self, place: int) -> _Member:
        return self._members[self._keys[place]]

    def _of(self, member: _Member) -> DualScan:
        assert self._scan is not None
        assert member.place >= 0
        return self._scan

    def _is_due(self) -> bool:
        if self._now >= self._look_again:
            return True
        if self._scan is not None and is_outdated(self._scan.state, self._decisions, self._needed - self._learned):
            return True
        planned = self._scan.waiting if self._scan else 0
        if self._new == 0:
            return False
        if planned == 0 or self._decisions >= PATIENCE:
            return True
        return self._new >= max(FEWEST, planned // 4)

    def _without_twins(self, places: list[int]) -> list[int]:
        """Return the keys to admit now, and hold the requests whose prefix is still being computed for another one.

        A held request comes when the prefix is in the cache.
        """
        scan = self._scan
        assert scan is not None
        kept: list[int] = []
        put_back: list[int] = []
        self._computing = [each for each in self._computing if each.runs and not each.stored]
        from_before = list(self._computing)
        for place in places:
            side, member = int(scan.state.requests[place].side), self._member(place)
            latest = self._latest[side]
            member.ready = common_prefix(latest.prompt, member.prompt) if latest else 0
            if latest is not None and latest.runs and not latest.stored and member.ready > latest.ready + PAGE:
                shared, member.ready = member.ready, self.cached(self._keys[place])
                if shared > member.ready + PAGE:
                    put_back.append(place)
                    continue
            unfinished = max((common_prefix(each.prompt, member.prompt) for each in from_before), default=0)
            if unfinished > PAGE and unfinished > self.cached(self._keys[place]) + PAGE:
                put_back.append(place)
                continue
            self._computing.append(member)
            member.before, self._latest[side] = latest, member
            member.runs = True
            self._overtakers.append(member.came)
            if member.tokens == 0:
                self.expected_cached += len(member.prompt) - int(scan.state.requests[place].fresh)
            kept.append(self._keys[place])
        for place in reversed(put_back):
            scan.put_back(place)
        if put_back:
            scan.come_soon()
        return kept

    def _plan(self) -> None:
        """Plan again from all that is known."""
        keys = list(self._members)
        members = [self._members[key] for key in keys] + list(self._ended)
        ended = np.arange(len(members)) >= len(keys)
        runs = np.array([member.runs for member in members], dtype=np.bool_)
        old = np.array([member.place for member in members], dtype=np.int64)
        kinds, caps, known, tokens = (
            np.array([(member.kind, member.cap, member.known, member.tokens) for member in members], dtype=np.int64)
            .reshape(-1, 4)
            .T
        )
        fresh, sides = np.zeros((2, len(members)), dtype=np.int64)
        owed = float(self._scan.state.totals[0].owed) if self._scan is not None else 0.0
        if self._scan is not None:
            requests = self._scan.state.requests
            tokens[runs] = output_tokens(self._scan.state, old[runs])
            fresh[runs], sides[runs] = column(requests, "fresh")[old[runs]], column(requests, "side")[old[runs]]

        tree = build_tree(_joined([member.prompt for member in members]))
        prefilled = np.array([member.prefilled for member in members], dtype=np.bool_)
        progress = Progress(
            caps,
            known,
            np.zeros_like(runs),
            tokens,
            runs,
            runs & prefilled,
            ended,
            fresh,
            sides,
            owed,
            self._urgency(members, runs | ended),
        )
        plan = plan_backlog(
            tree, group_requests(tree, kinds), progress, self.cost, self.costs, self.generator, self.share
        )
        self._scan, self._keys = DualScan(plan.state), keys
        self._look_again = self._now + plan.look_again_s
        self._learned, self._needed = 0, answers_before_next(progress.learned)
        for place, member in enumerate(members):
            member.place, member.tokens = place, int(tokens[place])
        self._new, self._decisions = 0, 0
        self.plans += 1

    def _urgency(self, members: list[_Member], is_over: Bools) -> Urgency:
        """Return the deadlines of all requests, and count who was overtaken since the last plan.

        No request is overtaken by more than MOST_OVERTAKEN others of its urgency and the plan's own step, nor for
        longer than LONGEST_WAIT_S.
        """
        overtakers, self._overtakers = np.sort(np.array(self._overtakers, dtype=np.int64)), []
        came = np.array([member.came for member in members], dtype=np.int64)
        later = len(overtakers) - np.searchsorted(overtakers, came, side="right")
        for at in np.flatnonzero((later > 0) & ~is_over).tolist():
            member = members[at]
            member.overtaken += int(later[at])
            member.since = min(member.since, self._now)
        aged = [member.overtaken >= MOST_OVERTAKEN or self._now - member.since >= LONGEST_WAIT_S for member in members]
        due_s = np.array([member.due for member in members]) - self._now
        return Urgency(due_s, np.array(aged, dtype=np.bool_), self._slowness.slowness)


def _joined(prompts: list[TokenIds]) -> Prompts:
    starts = np.zeros(len(prompts) + 1, dtype=np.int64)
    np.cumsum([len(prompt) for prompt in prompts], out=starts[1:])
    return Prompts(np.concatenate([np.empty(0, np.uint32), *prompts]), starts)
