"""Refuses online requests whose class cannot be kept, before they wait in vain.

The schedulers say what a new request would meet (`scheduler/foresight.py`); the requests that were sent to them since
are counted here. Who may wait is refused first.
"""

import time
from collections import deque
from statistics import mean

from engine_ext.coserve.slo import DEFAULT, FLEX, NAMES, PRIORITY, SloClass, SloClasses, strictest
from engine_ext.plugin.pulse import Pulses

FLEX_SHARE = 0.5  # of the default bounds: flex is refused when the others need so much of their time
TOKEN_BYTES = 4  # of a prompt, as an estimate before it is tokenized
UNSEEN_S = 2.0  # after which a request that no scheduler has seen does not count: it was refused on its way


class Shedding:
    """Knows what the schedulers of one engine foresaw, and what was sent to them since.

    `longest`: the most tokens of a prompt.
    """

    def __init__(self, pulses: Pulses, classes: SloClasses, longest: int) -> None:
        self._pulses = pulses
        self._classes = {each.name: each for each in classes}
        self._longest = longest
        self._sent: deque[tuple[float, str, int]] = deque()  # when, its class, and how many prompt tokens

    def sent(self, slo: str, size: int) -> None:
        """Note a request of this class and of so many bytes that goes to a scheduler now."""
        if slo != FLEX:  # whose prompts delay nobody: all others go before them
            self._sent.append((time.monotonic(), slo, min(size // TOKEN_BYTES, self._longest)))

    def refusal(self, slo: str) -> str | None:
        """Return why a request of this class would be late, or None."""
        found, kept, now = self._pulses.foreseen(), self._classes[slo], time.monotonic()
        told_at = max(now - UNSEEN_S, min((each.at_s for each in found), default=now))
        while self._sent and self._sent[0][0] < told_at:
            self._sent.popleft()
        if not found:  # no step has been decided yet
            return None
        before = NAMES[: NAMES.index(slo) + 1]  # the classes whose prompts go before a new one
        unseen = sum(tokens for _, other, tokens in self._sent if other in before)
        unseen_s = unseen * mean(each.token_s for each in found) / len(found)
        wait_s = unseen_s + mean(each.priority_s if slo == PRIORITY else each.default_s for each in found)
        step_s = mean(each.step_s for each in found)
        if kept.may_wait:
            share, ttft_s = FLEX_SHARE, self._classes[DEFAULT].bounds.ttft_s
        else:
            share, ttft_s = 1.0, kept.bounds.ttft_s
        if wait_s > share * ttft_s:
            return self._reason(kept, f"would wait {wait_s:.1f} s for its first token", ttft_s)
        # One more that decodes makes the steps of all stronger classes longer too.
        tpot_s = strictest(each for name, each in self._classes.items() if name in before).tpot_s
        if step_s > share * tpot_s:
            return self._reason(kept, f"would get a token every {step_s * 1000:.0f} ms", tpot_s)
        return None

    @staticmethod
    def _reason(kept: SloClass, what: str, bound_s: float) -> str:
        if kept.may_wait:
            return f"a request {what}, and those with deadlines come first"
        return f"a request of the class {kept.name} {what}, where {bound_s:g} s is the limit"
