"""Bounds the steps of one scheduler beside online requests, so that each of their tokens comes in time.

It knows when each online request came and got its tokens. From that comes the slack by which `step/decide.py` limits a
step, and the governor lowers the limit when batches have made requests late. Until the first online request, and from
an hour after the last one, batches have the engine to themselves. With profiled limits an hour begins with the engine's
first step, because online requests are expected.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from engine_ext.coserve.governor import Moment, is_late, note_served, served
from engine_ext.coserve.limit import NO_LIMITS, Limits
from engine_ext.coserve.predictor import Load, predict
from engine_ext.coserve.reserve import note_online_kv, reserve
from engine_ext.coserve.slo import DEFAULT, Bounds, SloClass, SloClasses, least_slack, strictest
from engine_ext.costs.engine_model import StepModel
from engine_ext.plugin.marks import slo_of
from engine_ext.plugin.scheduler.online import Demand, length
from engine_ext.plugin.scheduler.served import ServedClass
from engine_ext.step.memory import Memory, learn, new_memory, note_launch
from engine_ext.step.plan import StepPlan
from engine_ext.step.view import Online

LONGEST_STEP_S = 10.0  # a longer pause between two decisions was no step
UNTOLD_S = 0.0  # the time before the clock has told one, as with several ranks until they agree
FORGET_S = 3600.0  # without online requests, after which batches have the engine to themselves again


@dataclass(slots=True)
class Pace:
    """Holds when the tokens of an online request of the class `slo` came, in seconds of the scheduler's clock.

    `arrived_excess_s`, `first_excess_s`, `last_excess_s`: the seconds by which batches had made steps longer when it
    came, and at its first and its last token.
    """

    slo: SloClass
    arrived_s: float
    arrived_excess_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    generated: int = 0
    first_excess_s: float = 0.0
    last_excess_s: float = 0.0


@dataclass(eq=False)
class Beside:
    """The online requests of one scheduler, and how long its steps may be because of them.

    `classes`: the strongest first; a request of an unknown class is of the default one. `lag`: how many steps run that
    were launched before, when the next one is decided. `prompt_tokens`: the most of a step, if that was profiled.
    `limit_s`, `slack_s`: those of the last step. `limited`: steps in which the batches got fewer prompt tokens than the
    step had room for. `left_out`: decodes that steps left out. `ended`: online requests that have left; `late`: those
    of them that missed a bound. `ttft_s`, `tpot_s`: the longest so far of those with deadlines. `online_s`: the
    seconds that steps would have taken without batches. `served`: by class. `is_needed`: whether steps are limited: for
    an hour after the last online request, and with profiled limits after the first step.
    """

    classes: SloClasses
    memory: Memory
    lag: int
    prompt_tokens: int | None
    paces: dict[Any, Pace] = field(default_factory=dict[Any, Pace])
    limit_s: float = math.inf
    slack_s: float = math.inf
    limited: int = 0
    left_out: int = 0
    ended: int = 0
    late: int = 0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    online_s: float = 0.0
    served: dict[str, ServedClass] = field(default_factory=dict[str, ServedClass])
    _launched: deque[tuple[Load, Load]] = field(default_factory=deque[tuple[Load, Load]])
    _new: list[Pace] = field(default_factory=list[Pace])
    _bounds_by_names: dict[frozenset[str], Bounds] = field(default_factory=dict[frozenset[str], Bounds])
    _before: float = math.nan
    _seen_at: float = UNTOLD_S
    is_needed: bool = False

    @classmethod
    def of(
        cls, classes: SloClasses, limits: Limits, model: StepModel, capacity: int, lag: int, least_share: float = 0.0
    ) -> "Beside":
        """Return it as it is before the first step; see `new_memory` for `capacity` and `least_share`."""
        memory = new_memory(model, capacity, limits.profiled, least_share)
        return cls(classes, memory, lag, limits.prompt_tokens, is_needed=limits != NO_LIMITS)

    @property
    def excess_s(self) -> float:
        """The seconds by which batches have made steps longer so far."""
        return float(self.memory.governor.excess_s[0])

    @property
    def kept_free(self) -> int:
        """KV tokens to keep free for online requests."""
        return int(reserve(self.memory.held)) if self.is_needed else 0

    def arrived(self, req: Any, now: float) -> None:
        """Note that an online request has come."""
        self.is_needed, self._seen_at = True, now
        if req not in self.paces:
            self.paces[req] = pace = self._pace(req, now)
            self._new.append(pace)

    def pass_time(self, demand: Demand, now: float) -> None:
        """Note that the last step has ended, which tells how long such steps take and when its tokens came.

        Only while `is_needed`.
        """
        took, self._before = now - self._before, now
        if len(self._launched) > self.lag:
            load, theirs = self._launched.popleft()
            if 0 < took < LONGEST_STEP_S:
                before_s = self.excess_s
                learn(self.memory, load, theirs, took)
                self.online_s += took - (self.excess_s - before_s)
        for pace in self._new:  # they came when that step had ended
            pace.arrived_excess_s = self.excess_s
        self._new.clear()
        here = {req: self.paces.get(req) or self._pace(req, now) for req in (*demand.decoding, *demand.prompts)}
        for req, pace in self.paces.items():
            if req not in here:
                self._left(req, pace, now)
        self.paces = here
        self._seen_at = now if here or self._seen_at == UNTOLD_S else self._seen_at
        self.is_needed = now - self._seen_at < FORGET_S
        for req in demand.decoding:
            self._note_tokens(req, self.paces[req], now)
        if 0 < took < LONGEST_STEP_S:
            note_online_kv(self.memory.held, _kv_tokens(demand.decoding), took)

    def launched(self, load: Load, theirs: Load) -> None:
        """Note the step that runs now, and the online requests' part of it."""
        note_launch(self.memory, load, theirs)
        if load.prompt_tokens + load.decoding > 0:
            self._launched.append((load, theirs))
        else:
            self._launched.clear()

    def forget(self) -> None:
        """Forget all times, where the clock has not told them: requests count as on their pace when it does again."""
        self.paces.clear()
        self._new.clear()
        self._launched.clear()
        self._before, self._seen_at = math.nan, UNTOLD_S

    def needs(self, demand: Demand, now: float) -> tuple[Online, Bounds]:
        """Return what online requests need of the next step, and the bounds of those that are there."""
        running_s = sum(float(predict(self.memory.predictor, load)) for load, _ in self._launched)
        self.slack_s = self._least_slack(demand.decoding, now) - running_s
        decoding, prompts = self._with_deadlines(demand.decoding), self._with_deadlines(demand.prompts)
        due_tokens = demand.tokens
        if len(prompts) < len(demand.prompts):  # others may wait; nobody knows what of a prompt is cached
            due_tokens = sum(length(req) for req in demand.prompts if not self.paces[req].slo.may_wait)
            due_tokens = min(demand.tokens, due_tokens)
        needs = demand.needs._replace(
            decoding=len(decoding),
            due=len(prompts),
            due_tokens=due_tokens,
            slack_s=self.slack_s,
            first_slack_s=self._least_slack(demand.prompts, now) - running_s,
        )
        # Prompts that find no room wait for batches to end, and not for the step.
        return needs, self._bounds(decoding + ([] if self.memory.in_vain[0] else prompts))

    def decided(self, plan: StepPlan) -> None:
        """Note how online requests bound the next step."""
        self.limit_s = plan.limit_s
        self.limited += plan.is_cut

    def _with_deadlines(self, reqs: list[Any]) -> list[SloClass]:
        """Return the classes of those of these requests that have deadlines."""
        return [slo for req in reqs if not (slo := self.paces[req].slo).may_wait]

    def _bounds(self, here: list[SloClass]) -> Bounds:
        """Return the bounds of a step with requests of these classes.

        Its TTFT is the shortest of all classes, because a request of any class may come while it runs.
        """
        names = frozenset(each.name for each in here)
        if names not in self._bounds_by_names:
            present = [each for each in self.classes if each.name in names]
            shortest_s = strictest(self.classes).ttft_s
            self._bounds_by_names[names] = strictest(present or self.classes)._replace(ttft_s=shortest_s)
        return self._bounds_by_names[names]

    def _note_tokens(self, req: Any, pace: Pace, now: float) -> None:
        """Note the tokens that a request has got since it was last looked at."""
        generated = len(req.output_ids)
        if generated > pace.generated:
            if pace.generated == 0:  # one whose first tokens nobody saw counts as on its pace
                on_pace_s = (pace.slo.tpot_s or 0.0) if generated > 1 else 0.0
                pace.first_s = now - (generated - 1) * on_pace_s
                pace.first_excess_s = self.excess_s
            pace.last_s, pace.last_excess_s, pace.generated = now, self.excess_s, generated

    def _pace(self, req: Any, now: float) -> Pace:
        return Pace(self._class_of(slo_of(req)), now, self.excess_s)

    def _class_of(self, name: str) -> SloClass:
        return next((each for each in self.classes if each.name == name), self._default)

    @property
    def _default(self) -> SloClass:
        return next(each for each in self.classes if each.name == DEFAULT)

    def _left(self, req: Any, pace: Pace, now: float) -> None:
        """Note that a request has ended, or was aborted; its last token came with the step that has just ended."""
        self.ended += 1
        if isinstance(req.finished_reason, FINISH_ABORT):
            return
        self._note_tokens(req, pace, now)
        if pace.generated == 0:
            return
        arrived = Moment(pace.arrived_s, pace.arrived_excess_s)
        first, last = Moment(pace.first_s, pace.first_excess_s), Moment(pace.last_s, pace.last_excess_s)
        found = served(arrived, first, last, pace.generated)
        bounds = pace.slo.bounds
        late = is_late(bounds, found.ttft_s, found.tpot_s)
        self.served.setdefault(pace.slo.name, ServedClass()).note(found.ttft_s, found.tpot_s, late)
        if pace.slo.may_wait:
            return
        note_served(self.memory.governor, bounds, pace.slo.percentile, found, now)
        self.ttft_s, self.tpot_s = max(self.ttft_s, found.ttft_s), max(self.tpot_s, found.tpot_s)
        self.late += late

    def _least_slack(self, reqs: list[Any], now: float) -> float:
        """Return the least time until the next token of any of them is due."""
        paces = [self.paces[req] for req in reqs]
        classes = [each for each in self.classes if not each.may_wait] if paces else []
        return min(
            (self._slack_of(slo, [each for each in paces if each.slo is slo], now) for slo in classes), default=math.inf
        )

    @staticmethod
    def _slack_of(slo: SloClass, paces: list[Pace], now: float) -> float:
        if not paces:
            return math.inf
        times = np.array([(pace.arrived_s, pace.first_s, pace.last_s) for pace in paces])
        generated = np.array([pace.generated for pace in paces], dtype=np.int64)
        arrived_s, first_s, last_s = np.ascontiguousarray(times.T)
        return float(least_slack(slo.bounds, now, arrived_s, first_s, last_s, generated))


def _kv_tokens(reqs: list[Any]) -> int:
    return sum(length(req) for req in reqs)
