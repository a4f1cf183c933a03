"""Refuses online requests whose class cannot be kept, before they wait in vain.

The schedulers say what a new request would meet (`scheduler/foresight.py`); the requests that were sent to them since
are counted here. Who may wait is refused first.
"""

import time
from collections import deque

from engine_ext.coserve.slo import DEFAULT, FLEX, PRIORITY, SloClass, SloClasses
from engine_ext.plugin.pulse import Pulses

MAY_WAIT = 0.5  # of the default bounds: who may wait is refused when the others need so much of their time
TOKEN_BYTES = 4  # of a prompt, as an estimate before it is tokenized


class Shedding:
    """Knows what the schedulers of one engine foresaw, and what was sent to them since."""

    def __init__(self, pulses: Pulses, classes: SloClasses) -> None:
        self._pulses = pulses
        self._classes = {each.name: each for each in classes}
        self._sent: deque[tuple[float, int]] = deque()  # when, and how many prompt tokens

    def refusal(self, slo: str, size: int) -> str | None:
        """Return why a request of this class and of so many bytes would be late; None counts it as sent."""
        reason = self._against(slo)
        if reason is None and slo != FLEX:  # of which nobody waits for the prompts
            self._sent.append((time.monotonic(), size // TOKEN_BYTES))
        return reason

    def _against(self, slo: str) -> str | None:
        found, kept = self._pulses.foreseen(), self._classes[slo]
        if not found:
            self._sent.clear()  # nothing is foreseen before the first step
            return None
        told_at = min(each.at_s for each in found)
        while self._sent and self._sent[0][0] < told_at:
            self._sent.popleft()
        unseen_s = sum(tokens for _, tokens in self._sent) * min(each.token_s for each in found) / len(found)
        wait_s = unseen_s + min(each.priority_s if slo == PRIORITY else each.default_s for each in found)
        step_s = min(each.step_s for each in found)
        share, bounds = (MAY_WAIT, self._classes[DEFAULT].bounds) if kept.may_wait else (1.0, kept.bounds)
        if wait_s > share * bounds.ttft_s:
            return self._reason(kept, f"would wait {wait_s:.1f} s for its first token", bounds.ttft_s)
        if step_s > share * bounds.tpot_s:
            return self._reason(kept, f"would get a token every {step_s * 1000:.0f} ms", bounds.tpot_s)
        return None

    @staticmethod
    def _reason(kept: SloClass, what: str, bound_s: float) -> str:
        if kept.may_wait:
            return f"a request {what}, and those with deadlines come first"
        return f"a request of the class {kept.name} {what}, where {bound_s:g} s is the limit"
