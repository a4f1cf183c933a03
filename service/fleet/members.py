"""Puts together what the cluster and the workers' heartbeats say of each engine."""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from service.fleet.engines import Engine


class Phase(StrEnum):
    STARTING = "starting"  # has no heartbeat
    BUSY = "busy"
    IDLE = "idle"
    LEAVING = "leaving"  # drained, by the fleet or an operator, or asked to stop


@dataclass(frozen=True, slots=True)
class Member:
    """An engine of the fleet.

    `for_s`: how long it has been in its phase; `age_s`: how long since it became ready, or since it was first seen if
    it is not; `holds`: slices and online requests that its worker has; `asked_s`: how long since it was asked to stop,
    None if it was not.
    """

    engine: Engine
    phase: Phase
    for_s: float
    age_s: float
    holds: int = 0
    asked_s: float | None = None


class Members:
    """Remembers since when each engine has been in its phase."""

    def __init__(self) -> None:
        self._phases: dict[str, tuple[Phase, float]] = {}
        self._seen_at: dict[str, float] = {}  # when it was first seen, or became ready
        self._asked_at: dict[str, float] = {}
        self.starts_s: dict[str, float] = {}  # by model: how long its last engine took to start

    def asked_to_stop(self, engine: str) -> None:
        self._asked_at.setdefault(engine, time.monotonic())

    def look(
        self, engines: Sequence[Engine], alive: Mapping[str, Mapping[str, Any]], drained: Collection[str]
    ) -> list[Member]:
        """Return the members. `alive`: heartbeats by worker; `drained`: names of workers."""
        now = time.monotonic()
        there = {engine.id for engine in engines}
        for memory in (self._phases, self._seen_at, self._asked_at):
            for engine in [each for each in memory if each not in there]:
                del memory[engine]
        return [self._member(each, alive.get(each.worker), each.worker in drained, now) for each in engines]

    def _member(self, engine: Engine, beat: Mapping[str, Any] | None, is_drained: bool, now: float) -> Member:
        seen_at = self._seen_at.setdefault(engine.id, now)
        holds = 0 if beat is None else int(beat["slices"]) + int(beat.get("online_requests") or 0)
        asked_at = self._asked_at.get(engine.id)
        if asked_at is not None or is_drained:
            phase = Phase.LEAVING
        elif beat is None:
            phase = Phase.STARTING
        else:
            phase = Phase.BUSY if holds else Phase.IDLE
        before, since = self._phases.get(engine.id, (None, now))
        if phase != before:
            since = now
            if before == Phase.STARTING and beat is not None:
                self.starts_s[engine.model] = now - seen_at
                seen_at = self._seen_at[engine.id] = now
        self._phases[engine.id] = (phase, since)
        asked_s = None if asked_at is None else now - asked_at
        return Member(engine, phase, now - since, now - seen_at, holds, asked_s)
