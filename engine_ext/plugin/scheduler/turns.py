"""Lets online requests of a class take turns by project, and leaves a part of the engine to others.

Who sends many requests, long ones, or one with many choices, waits for its own: by fair queueing, each request of a
project has its turn after the one before by its prompt tokens, divided by the project's weight, and none before those
that have been.
All ranks see the same requests in the same order, and no clock decides.
"""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from engine_ext.plugin.marks import project_of, weight_of
from engine_ext.plugin.scheduler.online import LOOKED_UP, is_ours, length, rank, reservation

LEFT = 8  # of so many request slots, and of so much KV cache, one part is left to others
LATELY = 1000  # online requests, among which one of another project is a reason to leave it room
SHOWN = 256  # waiting requests that a step may look at
KNOWN = 10_000  # projects
DECODE_EACH = 1024  # online prompt tokens for which those that decode get a step
STEP_TOKENS = 256  # prompt tokens that take about as long as a step's read of all weights
MOST_DUE = 8.0  # steps of decodes, one after the other


def order(req: Any) -> tuple[int, float]:
    """Return the place of an online request in the queue: stronger classes first, and then by turn."""
    return rank(req), getattr(req, "batchweave_turn", 0.0)


@dataclass(eq=False)
class Turns:
    """Whose turn it is in one scheduler."""

    # By class: the latest turn of a request that was admitted, and by project that of its last request.
    _now: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    _last: dict[tuple[int, str], float] = field(default_factory=dict[tuple[int, str], float])
    _came: int = 0
    _lately: OrderedDict[str, int] = field(default_factory=OrderedDict[str, int])  # the number of its last request
    _first: Any = None  # of SGLang's queue, for which it looked for room
    decodes_due: float = 0.0  # steps of those that decode, which online prompts have put off

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
            of, key = rank(req), (rank(req), project)
            # By prompt tokens, because those hold a step while others wait; what is decoded, all decode together.
            cost = _cost(req, len(req.origin_input_ids))
            req.batchweave_turn = max(self._now[of], self._last.get(key, 0.0)) + cost
            if len(self._last) >= KNOWN:
                self._last = {each: turn for each, turn in self._last.items() if turn > self._now[each[0]]}
            self._last[key] = req.batchweave_turn
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
        ratio = float(scheduler.new_token_ratio_tracker.current)
        slots, kv = Counter(map(project_of, theirs)), Counter[str]()
        for req in theirs:
            kv[project_of(req)] += _held(req, ratio)
        most = max(1, int(scheduler.max_running_requests) * (LEFT - 1) // LEFT)
        most_kv = capacity * (LEFT - 1) // LEFT
        shown, held, full = list[Any](), list[Any](), set[str]()
        for place, req in enumerate(queue):
            if len(shown) >= SHOWN:
                held += queue[place:]
                break
            project, tokens = project_of(req), int(ratio * reservation(req))
            if several and (slots[project] >= most or (slots[project] and kv[project] + tokens > most_kv)):
                full.add(project)  # also for its later ones, which would overtake this one
            has_no_room = slots.total() >= most or (slots.total() and kv.total() + tokens > most_kv)
            if project in full or (batches_wait and has_no_room):
                held.append(req)
                continue
            shown.append(req)
            slots[project] += 1
            kv[project] += tokens
        scheduler.waiting_queue = shown
        return held

    def note_first(self, scheduler: Any) -> None:
        """Note with an online prompt of which a part is computed the requests that wait and whose turn is before its.

        It leaves room to them in the next step (`adder_hooks.py`).
        """
        continued = scheduler.chunked_req
        if continued is not None and not is_ours(continued):
            turn = order(continued)
            first = takewhile(lambda req: order(req) < turn, scheduler.waiting_queue[:LOOKED_UP])
            continued.batchweave_first = list(first)

    def look_again(self, queue: list[Any], running: Any) -> None:
        """Let SGLang look for room if another request than before is first.

        SGLang notes that there is none when one does not fit, and looks again only when one ends. That is late for a
        project to which the room is left that others may not have.
        """
        first = queue[0] if queue else None
        if first is not self._first:
            self._first, running.batch_is_full = first, False

    def are_decodes(self, running: Any) -> bool:
        """Return whether the next step is of those that decode, though prompts wait."""
        return self.decodes_due >= 1 and any(not req.finished() for req in running.reqs)

    def note_step(self, batch: Any) -> None:
        """Note what is computed now: prompts, or, if it is None, a token of each that decodes.

        Where SGLang mixes no decodes into a step of prompts, it computes prompt after prompt, and who streams stands
        still while they come.
        """
        if batch is None:
            self.decodes_due = max(0.0, self.decodes_due - 1)
        elif batch.decoding_reqs is None and not all(is_ours(req) for req in batch.reqs):
            tokens = STEP_TOKENS + sum(req.extend_range.length for req in batch.reqs)
            self.decodes_due = min(MOST_DUE, self.decodes_due + tokens / DECODE_EACH)

    def show(self, scheduler: Any, before: list[Any], held: list[Any]) -> None:
        """Put back what was held back, after a step before which `before` waited."""
        here, continued = set(scheduler.waiting_queue), scheduler.chunked_req
        if continued is not None and not is_ours(continued):
            before = [*before, continued]
        for req in before:
            if req not in here:
                of, turn = order(req)
                # Who comes while a long prompt is computed is not behind the rest of it.
                left = length(req) - req.extend_range.end if req is continued else 0
                self._now[of] = max(self._now[of], turn - _cost(req, left))
        if held:
            scheduler.waiting_queue = sorted([*scheduler.waiting_queue, *held], key=order)


def chunk_tokens(first: Iterable[int], most: int, page: int) -> int:
    """Return how many of `most` prompt tokens the next chunk of a prompt gets, a page at least; others get the rest.

    `first`: what each of the others needs. One that does not fit beside the chunk waits, with those behind it: SGLang
    has one prompt in chunks at a time.
    """
    left = most
    for tokens in first:
        if left - tokens < page:
            break
        left -= tokens
    return max(page, left // page * page)


def _cost(req: Any, tokens: int) -> float:
    """Return how much later the next turn of the request's project is for so many prompt tokens."""
    return tokens / weight_of(req)


def _held(req: Any, ratio: float) -> int:
    """Return the KV tokens that a request holds alone, and those that SGLang reserves for the rest of its answer."""
    own = len(req.origin_input_ids) - int(getattr(req, "cached_tokens", 0)) + len(req.output_ids)
    return max(0, own) + int(ratio * reservation(req))
