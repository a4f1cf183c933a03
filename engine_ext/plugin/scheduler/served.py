"""Counts how online requests of each class were served, for metrics and pages."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine_ext.coserve.slo import SloClass

RECENT = 1024  # requests, of which the quantiles are
QUANTILES = (0.5, 0.99)


@dataclass(slots=True)
class ServedClass:
    """The requests of one class that have ended: how many, how many missed a bound, and the last ones' times.

    `recent`: the TTFT and the TPOT of each, in seconds.
    """

    ended: int = 0
    late: int = 0
    recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=RECENT))

    def note(self, ttft_s: float, tpot_s: float, is_late: bool) -> None:
        self.ended += 1
        self.late += is_late
        self.recent.append((ttft_s, tpot_s))

    def report(self, slo: SloClass) -> dict[str, Any]:
        """Return the figures beside the bounds of the class."""
        times = np.quantile(np.array(self.recent), QUANTILES, axis=0).tolist() if self.recent else [[0.0, 0.0]] * 2
        (ttft_p50_s, tpot_p50_s), (ttft_p99_s, tpot_p99_s) = times
        return {
            "tier": slo.name,
            "ended": self.ended,
            "late": self.late,
            "ttft_s": slo.ttft_s,
            "tpot_s": slo.tpot_s,
            "ttft_p50_s": ttft_p50_s,
            "ttft_p99_s": ttft_p99_s,
            "tpot_p50_s": tpot_p50_s,
            "tpot_p99_s": tpot_p99_s,
        }
