"""Measures how much longer an engine's steps take than the cost model says, so that deadlines are told in real time."""

import math
from dataclasses import dataclass

from engine_ext.scan.state import StepCosts
from engine_ext.scan.tuning import LONGEST_STEP_S, SLOWNESS_KEEPS, UNKNOWN_STEPS


@dataclass(slots=True)
class Slowness:
    """Real seconds per second of the cost model, over the last few hundred steps; 1 until there were some."""

    _before: float = math.nan
    _expected_s: float = 0.0  # of the step that runs now; 0 where nothing runs
    _real_s: float = 0.0
    _model_s: float = 0.0
    _steps: float = 0.0

    def measure(self, now: float) -> None:
        """Note that the step that runs has ended."""
        took = now - self._before
        self._before = now
        if self._expected_s > 0 and 0 < took < LONGEST_STEP_S:
            self._real_s = SLOWNESS_KEEPS * self._real_s + took
            self._model_s = SLOWNESS_KEEPS * self._model_s + self._expected_s
            self._steps = SLOWNESS_KEEPS * self._steps + 1

    def expect(self, seconds: float) -> None:
        """Note the step that begins now, and the seconds that it takes by the cost model."""
        self._expected_s = seconds

    @property
    def slowness(self) -> float:
        return self._real_s / self._model_s if self._steps >= UNKNOWN_STEPS and self._model_s > 0 else 1.0


def step_s(costs: StepCosts, prompts: int, decoding: int, decoding_kv: int) -> float:
    """Return the seconds of a step of so many prompt tokens and decodes; 0 for an empty one."""
    if prompts + decoding == 0:
        return 0.0
    compute_s, reads_s = max((prompts + decoding) * costs.gemm_s, costs.weights_s), decoding_kv * costs.read_s
    return compute_s + reads_s if costs.bursts else max(compute_s, reads_s)
