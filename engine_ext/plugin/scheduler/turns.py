"""Lets online requests of a class take turns by project, and leaves a part of the engine to others.

Who sends many requests, or one with many choices, waits for its own: by start-time fair queueing, each request of a
project has its turn one after the one before, divided by the project's weight, and no turn before those that have been.
All ranks see the same requests in the same order, and no clock decides.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Any

from engine_ext.plugin.marks import project_of, weight_of
from engine_ext.plugin.scheduler.online import is_ours, length, rank

LEFT = 8  # of so many request slots, and of so much KV cache, one part is left to others
LATELY = 10_000  # online requests, among which one of another project is a reason to leave it room
SHOWN = 256  # waiting requests that a step may look at
KNOWN = 10_000  # projects


def order(req: Any) -> tuple[int, float]:
    """Return the place of an online request in the queue: stronger classes first, and then by turn."""
    return rank(req), getattr(req, "batchweave_turn", 0.0)


@dataclass(eq=False)
class Turns:
    """Whose turn it is in one scheduler."""

    _now: float = 0.0  # the turn of the last request that was admitted
    _last: dict[str, float] = field(default_factory=dict[str, float])  # by project
    _came: int = 0
    _lately: OrderedDict[str, int] = field(default_factory=OrderedDict[str, int])  # the number of its last request

    def came(self, queue: list[Any]) -> None:
        """Give the last request of a queue its turn, and move it to its place. One that was retracted keeps its own."""
        req = queue[-1]
        project = project_of(req)
        if not hasattr(req, "batchweave_turn"):
            self._came += 1
            self._lately[project] = self._came
            self._lately.move_to_end(project)
            if self._lately[next(iter(self._lately))] <= self._came - LATELY:
                self._lately.popitem(last=False)
            req.batchweave_turn = max(self._now, self._last.get(project, 0.0)) + 1.0 / weight_of(req)
            if len(self._last) >= KNOWN:
                self._last = {each: turn for each, turn in self._last.items() if turn > self._now}
            self._last[project] = req.batchweave_turn
        place = len(queue) - 1
        while place > 0 and not is_ours(queue[place - 1]) and order(queue[place - 1]) > order(req):
            place -= 1
        queue.insert(place, queue.pop())

    def hold_back(self, scheduler: Any, decoding: list[Any], capacity: int, batches_wait: bool) -> list[Any]:
        """Take out of SGLang's queue the requests that must leave room for others, and return them.

        `decoding`: all that decode. `capacity`: of the KV cache, in tokens. `batches_wait`: whether some room is left
        to batches.
        """
        queue = scheduler.waiting_queue
        several = len(self._lately) > 1
        if not queue or not (several or batches_wait):
            return []
        continued = scheduler.chunked_req
        theirs = [req for req in (*decoding, *([] if continued is None else [continued])) if not is_ours(req)]
        slots, kv = Counter(map(project_of, theirs)), Counter[str]()
        for req in theirs:
            kv[project_of(req)] += length(req)
        total, most = len(theirs), int(scheduler.max_running_requests) * (LEFT - 1) // LEFT
        most, most_kv = max(1, most), capacity * (LEFT - 1) // LEFT
        shown, held = list[Any](), list[Any]()
        for req in queue:
            project, tokens = project_of(req), length(req)
            is_full = slots[project] >= most or (slots[project] > 0 and kv[project] + tokens > most_kv)
            if (several and is_full) or (batches_wait and total >= most) or len(shown) >= SHOWN:
                held.append(req)
                continue
            shown.append(req)
            slots[project] += 1
            kv[project] += tokens
            total += 1
        scheduler.waiting_queue = shown
        return held

    def show(self, scheduler: Any, before: list[Any], held: list[Any]) -> None:
        """Put back what was held back, after a step before which `before` waited."""
        here = set(scheduler.waiting_queue)
        self._now = max((order(req)[1] for req in before if req not in here), default=self._now)
        if held:
            scheduler.waiting_queue = sorted([*scheduler.waiting_queue, *held], key=order)
