"""Brings what a real scheduler held in a step into a simulated engine, which then looks, and carries out the plan."""

from typing import NamedTuple

import numpy as np

from engine_ext.arrays import Column, column
from engine_ext.compiled import compiled
from engine_ext.coserve.slo import SloClasses
from engine_ext.costs.engine_model import StepModel
from engine_ext.plan.prompts import Prompts
from engine_ext.plan.tree import build_tree
from engine_ext.scan.state import State
from engine_ext.simulate.apply import apply
from engine_ext.simulate.cache import Cache, evictable_leaves, grow, lock, make_ready, new_cache
from engine_ext.simulate.line import ARRIVED, ONLINE, Line, new_line
from engine_ext.simulate.observe import look
from engine_ext.simulate.ours import Ours, rules_of
from engine_ext.simulate.shared_engine import DECODE, NOBODY, PREFILL, WAITS, SharedEngine, new_shared_engine
from engine_ext.step.plan import StepPlan
from engine_ext.step.view import View
from tests.engine.step.frames import Frame

NO_COLUMN: Column = np.zeros(0, dtype=np.int64)


class Became(NamedTuple):
    """What became of a plan: who rests, who has left, and the prompt tokens that each computes."""

    rests: set[str]
    made_way: set[str]
    computed: dict[str, int]


class Mirror:
    """A simulated engine with the requests of one run.

    `prompts`, `outputs`: by request; the batch's come first. `slos`: the place in `classes` of each online one.
    """

    def __init__(
        self,
        names: list[str],
        prompts: list[list[int]],
        outputs: list[int],
        capacity: int,
        model: StepModel,
        classes: SloClasses,
        slos: list[int],
        largest: int,
    ) -> None:
        self._numbers = {name: number for number, name in enumerate(names)}
        told = Prompts.of(prompts)
        self._tree = build_tree(told)
        self._leaf = np.empty(len(names), dtype=np.int64)
        self._leaf[self._tree.order] = self._tree.leaves
        self._lengths, self._outputs, self._capacity = told.lengths, np.array(outputs), capacity
        self._slos = [0] * (len(names) - len(slos)) + slos
        self._rules = rules_of(classes, largest, True, model, 0.7)

    def show(self, frame: Frame) -> None:
        """Put the engine into the state of this step."""
        assert frame.memory is not None
        here = [name for name in (*frame.decoding, frame.chunked) if name and not frame.held[name].is_ours]
        self.names: list[str | None] = [*frame.places, *here, *frame.waiting]
        self.first_online = len(frame.places)
        numbers = np.array([self._numbers[name] if name else 0 for name in self.names], dtype=np.int64)
        online = np.arange(len(numbers)) >= self.first_online
        leaf = np.where([name is not None for name in self.names], self._leaf[numbers], 0)
        self.engine: SharedEngine = new_shared_engine(
            leaf, self._lengths[numbers], self._outputs[numbers], online, np.zeros(len(numbers))
        )
        self.cache: Cache = new_cache(self._tree.parent, self._tree.begin, self._tree.end, self._capacity)
        self.line: Line = new_line(np.arange(self.first_online, dtype=np.int64), len(numbers))
        self.line.at[ARRIVED], self.line.at[ONLINE] = len(numbers) - self.first_online, len(here)
        self._index = {name: number for number, name in enumerate(self.names) if name}
        self._inexact = set[str]()
        for name, number in self._index.items():
            self._describe(frame, name, number)
            if name in frame.held:
                self._keep(name, number, frame.held[name].cached)
        decoding = np.array([self._index[name] for name in frame.decoding], dtype=np.int64)
        chunked = NOBODY if frame.chunked is None else self._index[frame.chunked]
        _put_on_engine(self.engine, self.cache, decoding, chunked, frame.view.chunk.left)
        self.engine.totals[0].now_s = frame.now
        self.ours = self._ours(frame, len(numbers))

    def look(self) -> View:
        return look(self.engine, self.cache, self.line, self.ours, self._rules, self.first_online)

    def is_exact(self, frame: Frame) -> bool:
        """Return whether the simulated cache holds as much of the admitted requests: it knows no parts of a node."""
        return self._inexact.isdisjoint(frame.admitted)

    def apply(self, frame: Frame, view: View, plan: StepPlan) -> Became:
        """Carry the plan out; `ours.rests` says who rests."""
        assert frame.state is not None
        before = {k for k in range(len(self.names)) if self.engine.requests[k].state in (PREFILL, DECODE)}
        _apply(self.engine, self.cache, frame.state, self.line, self.ours, view, plan, self.first_online)
        requests, takes = self.engine.requests, column(self.engine.requests, "take")
        named = {k: name for k, name in enumerate(self.names) if name}
        return Became(
            {named[k] for k in before if requests[k].rests == 1 and requests[k].state == DECODE},
            {named[k] for k in before if requests[k].state == WAITS or (plan.parks and named[k] == frame.chunked)},
            {named[k]: int(takes[k]) for k in named if requests[k].state == PREFILL and takes[k] > 0},
        )

    def _ours(self, frame: Frame, count: int) -> Ours:
        assert frame.memory is not None

        def places() -> Column:
            return np.zeros(count, dtype=np.int64)

        return Ours(
            frame.memory,
            places(),
            places(),
            places(),
            np.zeros(count, dtype=np.bool_),
            np.full(1, frame.decoded, dtype=np.int64),
            np.zeros(count),
            np.zeros(count),
            np.full(1, frame.ratio),
            NO_COLUMN,
        )

    def _describe(self, frame: Frame, name: str, number: int) -> None:
        r, held = self.engine.requests[number], frame.held.get(name)
        r.state, r.slo = WAITS, self._slos[self._numbers[name]]
        if held is not None:
            r.generated, r.skipped, r.preempted = held.generated, held.skipped, held.made_way
            r.arrives_s, r.first_s, r.last_s = held.times

    def _keep(self, name: str, number: int, tokens: int) -> None:
        """Keep the first tokens of a request in the cache: whole nodes of its prompt, and then its answer."""
        path, cache, r = list[int](), self.cache, self.engine.requests[number]
        leaf = int(r.leaf)
        while leaf != 0:
            path.append(leaf)
            leaf = int(cache.parent[leaf])
        for node in reversed(path):
            if cache.cached[node]:
                continue
            if cache.begin[node] + cache.size[node] > tokens:
                if cache.begin[node] < tokens:
                    self._inexact.add(name)
                break
            cache.cached[node] = cache.ready[node] = True
            cache.children[cache.parent[node]] += 1
            cache.tokens[0].free -= cache.size[node]
            cache.tokens[0].evictable += cache.size[node]
        if tokens > r.prompt and r.generated > 0 and r.online == 0:
            r.kept = tokens - r.prompt
            cache.extra[r.leaf] += r.kept
            cache.tokens[0].free -= r.kept
            cache.tokens[0].evictable += r.kept


@compiled
def _put_on_engine(engine: SharedEngine, cache: Cache, decoding: Column, chunked: int, left: int) -> None:
    """Let these requests decode, and one, or NOBODY, have `left` prompt tokens to compute."""
    heap, totals = evictable_leaves(cache), engine.totals[0]
    for place in range(len(decoding)):
        r, before = engine.requests[decoding[place]], cache.tokens[0].locked
        lock(cache, heap, r.leaf)
        make_ready(cache, r.leaf)
        r.held = r.generated - 1
        grow(cache, heap, r.held)
        r.state, r.place = DECODE, place
        engine.decoding[place] = decoding[place]
        if r.online == 1:
            totals.online_decoding += 1
            totals.online_kv += r.prompt + r.generated
            totals.online_locked += cache.tokens[0].locked - before
    totals.decoding = len(decoding)
    if chunked != NOBODY:
        r = engine.requests[chunked]
        lock(cache, heap, r.leaf)
        grow(cache, heap, r.generated)
        r.state, r.left, r.held = PREFILL, left, r.generated
        engine.prefilling[0] = chunked
        totals.prefilling = 1


@compiled
def _apply(
    engine: SharedEngine,
    cache: Cache,
    state: State,
    line: Line,
    ours: Ours,
    view: View,
    plan: StepPlan,
    first_online: int,
) -> None:
    apply(engine, cache, evictable_leaves(cache), state, line, ours, view, plan, first_online)
