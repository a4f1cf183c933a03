"""Remembers on which machines the engines of which models have failed, so that they rest before another try."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

FIRST_S, LONGEST_S = 60.0, 1800.0


@dataclass(slots=True)
class _Rest:
    failures: int = 0
    failed_at: float = 0.0
    until: float = 0.0


@dataclass(slots=True)
class Rests:
    """Keeps the rests by model and machine."""

    _rests: dict[tuple[str, str], _Rest] = field(default_factory=dict[tuple[str, str], _Rest])

    def begin(self, model: str, machines: Iterable[str]) -> float:
        """Count a failure on these machines; return the seconds for which the model is not started there."""
        now, longest = time.monotonic(), 0.0
        for machine in machines:
            rest = self._rests.setdefault((model, machine), _Rest())
            rest.failures += 1
            rest_s = min(FIRST_S * 2 ** (rest.failures - 1), LONGEST_S)
            rest.failed_at, rest.until = now, now + rest_s
            longest = max(longest, rest_s)
        return longest

    def end(self, model: str, machines: Iterable[str], ready_s: float) -> None:
        """Forget the failures on these machines before the model's engine there became ready, `ready_s` ago."""
        ready_at = time.monotonic() - ready_s
        for machine in machines:
            if (model, machine) in self._rests and self._rests[model, machine].failed_at < ready_at:
                del self._rests[model, machine]

    def machines(self, model: str) -> set[str]:
        """Return the machines on which no engine of the model may start now."""
        now = time.monotonic()
        return {machine for (each, machine), rest in self._rests.items() if each == model and now < rest.until}
