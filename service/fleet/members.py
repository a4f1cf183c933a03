"""Puts together what the cluster and the workers' heartbeats say of each engine."""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from service.fleet.engines import Engine, NewEngine, worker_name
from service.fleet.node import NodeState

UNSEEN_S = 600.0  # after which an engine that was started and never seen was none


class Phase(StrEnum):
    STARTING = "starting"  # has no heartbeat
    BUSY = "busy"
    IDLE = "idle"
    LEAVING = "leaving"  # drained, by the fleet or an operator, or asked to stop


@dataclass(frozen=True, slots=True)
class Member:
    """Says what an engine of the fleet does.

    `for_s`: how long it has been in its phase; `age_s`: how long since it became ready, or since it was first seen if
    it never was; `holds`: slices and online requests that its worker has; `failures`: how often its worker has ended
    since it was last ready; `asked_s`: how long since it was asked to stop, None if it was not.
    """

    engine: Engine
    phase: Phase
    for_s: float
    age_s: float
    holds: int = 0
    failures: int = 0
    asked_s: float | None = None


class Members:
    """Remembers what a look at the engines cannot show: since when they are what they are."""

    def __init__(self) -> None:
        self._phases: dict[str, tuple[Phase, float]] = {}
        self._since: dict[str, float] = {}  # when each became ready, or was first seen
        self._exits: dict[str, int] = {}  # of each, when it was last ready, or first seen
        self._asked_at: dict[str, float] = {}
        self._started_at: dict[str, float] = {}  # those that this fleet has started and that were not ready yet
        self._new: dict[str, NewEngine] = {}  # those that this fleet has started
        self.starts_s: dict[str, float] = {}  # by model: how long the last engine that this fleet started took

    def started(self, new: NewEngine) -> None:
        self._started_at[new.id], self._new[new.id] = time.monotonic(), new

    def asked_to_stop(self, engine: str) -> None:
        self._asked_at.setdefault(engine, time.monotonic())

    def look(
        self, engines: Sequence[Engine], alive: Mapping[str, Mapping[str, Any]], drained: Collection[str]
    ) -> list[Member]:
        """Return the members. `alive`: heartbeats by worker; `drained`: names of workers."""
        now = time.monotonic()
        for engine in engines:
            self._fill_in(engine)
        found = [self._member(each, alive.get(each.worker), each.worker in drained, now) for each in engines]
        there = {engine.id for engine in engines}
        for memory in (self._phases, self._since, self._exits, self._asked_at):
            for engine in [each for each in memory if each not in there]:
                del memory[engine]
        for engine, at in list(self._started_at.items()):
            if engine not in there and now - at > UNSEEN_S:
                del self._started_at[engine]
        self._new = {name: new for name, new in self._new.items() if name in there or name in self._started_at}
        return found

    def _fill_in(self, engine: Engine) -> None:
        """Say for machines that have not answered yet what this fleet has started there.

        Otherwise their GPUs would count as somebody else's, and engines would be taken away for want of GPUs.
        """
        new, known = self._new.get(engine.id), {node.rank for node in engine.nodes}
        for rank, machine in enumerate(new.machines if new else ()):
            if new and rank not in known:
                name = worker_name(new.name, rank)
                engine.nodes.append(NodeState(rank, len(new.machines), new.gpus, new.digest, name, machine=machine))

    def _member(self, engine: Engine, beat: Mapping[str, Any] | None, is_drained: bool, now: float) -> Member:
        name = engine.id
        self._since.setdefault(name, now)
        self._exits.setdefault(name, engine.exits)
        if beat is not None:
            self._exits[name] = engine.exits
            started_at = self._started_at.pop(name, None)
            if started_at is not None:
                self.starts_s[engine.model] = now - started_at
                self._since[name] = now
        holds = 0 if beat is None else int(beat["slices"]) + int(beat.get("online_requests") or 0)
        asked_at = self._asked_at.get(name)
        if asked_at is not None or is_drained:
            phase = Phase.LEAVING
        elif beat is None:
            phase = Phase.STARTING
        else:
            phase = Phase.BUSY if holds else Phase.IDLE
        before, since = self._phases.get(name, (None, now))
        since = since if phase == before else now
        self._phases[name] = (phase, since)
        failures = engine.exits - self._exits[name]
        asked_s = None if asked_at is None else now - asked_at
        return Member(engine, phase, now - since, now - self._since[name], holds, failures, asked_s)
