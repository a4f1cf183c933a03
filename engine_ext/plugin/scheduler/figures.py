"""Counts what the scan's admissions came to in one scheduler, for its report."""

from collections import deque
from dataclasses import dataclass, field

from engine_ext.plugin.scheduler.member import Reason

RECENT = 4096  # steps


@dataclass(eq=False)
class Figures:
    """What was done since the engine's start.

    `refused`: admissions that SGLang did not take. `parked`, `preempted`, `retractions`: requests of batches that wait
    again, by reason. `yielded`: steps in which a batch's prompt left online ones their part. `online_most_steps`: the
    most steps that an online request waited. `deciding_s`: all that the hooks of the scheduler's loop took, without
    SGLang's part; `deciding`: that of the last steps.
    """

    admitted: int = 0
    refused: int = 0
    parked: int = 0
    yielded: int = 0
    preempted: int = 0
    retractions: int = 0
    retracted_tokens: int = 0
    online_admitted: int = 0
    online_most_steps: int = 0
    deciding_s: float = 0.0
    deciding: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def note_stop(self, reason: Reason, tokens: int) -> None:
        """Note that a request of so many tokens waits again."""
        self.parked += reason is Reason.PARKED
        self.preempted += reason is Reason.TAKEN_OFF
        self.retractions += reason is Reason.RETRACTED
        self.retracted_tokens += tokens if reason is Reason.RETRACTED else 0

    def note_time(self, seconds: float, is_step: bool = True) -> None:
        """Note how long the hooks took; `is_step`: in a step, and not beside it."""
        self.deciding_s += seconds
        if is_step:
            self.deciding.append(seconds)
