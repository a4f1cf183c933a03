"""Stands in for an engine that runs some requests at once, each for a given time, and lets the others wait."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from engine_ext.plugin.marks import NO_TERMS, Terms
from engine_ext.plugin.worker.answers import Answer
from service.worker.script import Rule, Script
from service.worker.scripted import ScriptedEngine


class PacedEngine(ScriptedEngine):
    """Echoes `at_once` requests at a time, each after `seconds(prompt)`.

    `runs` counts how often each prompt ran; `ends` has the times of the answers, by time.monotonic.
    """

    def __init__(self, at_once: int, seconds: Callable[[str], float]) -> None:
        super().__init__(Script(at_once=at_once))
        self._seconds = seconds
        self.runs = Counter[str]()
        self.ends: list[float] = []

    def rule_for(self, prompt: str) -> Rule:
        self.runs[prompt] += 1
        return Rule(delay_s=self._seconds(prompt))

    async def run(self, endpoint: str, body: dict[str, Any], rid: str, kind: str, terms: Terms = NO_TERMS) -> Answer:
        answer = await super().run(endpoint, body, rid, kind, terms)
        if not answer.aborted:
            self.ends.append(time.monotonic())
        return answer
