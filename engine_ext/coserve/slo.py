"""Says how late each token of an online request may be: classes of service levels, and the deadlines that they set.

The classes are OpenAI's service tiers. Requests of a stronger class go first; `flex` has no deadline.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engine_ext.arrays import Column, Floats
from engine_ext.compiled import compiled
from engine_ext.errors import InputError


class Bounds(NamedTuple):
    """A class's bounds in seconds, for compiled functions; infinite where the class has none."""

    ttft_s: float
    tpot_s: float
    tbt_s: float


PRIORITY, DEFAULT, FLEX = "priority", "default", "flex"
NAMES = (PRIORITY, DEFAULT, FLEX)  # the strongest first


@dataclass(frozen=True, slots=True)
class SloClass:
    """The service level of a class of online requests; None where it sets no bound.

    `ttft_s`: the most seconds from arrival to the first token. `tpot_s`: the most seconds per token after that, as a
    mean over the answer. `tbt_s`: the most seconds between any two tokens. `percentile`: the share of requests that
    must keep all of them.
    """

    name: str = DEFAULT
    ttft_s: float | None = None
    tpot_s: float | None = None
    tbt_s: float | None = None
    percentile: float = 0.99

    def __post_init__(self) -> None:
        for field in ("ttft_s", "tpot_s", "tbt_s"):
            value = getattr(self, field)
            if value is not None and not 0 < value < math.inf:
                raise InputError(f"the {field} of an SLO must be a number of seconds above 0, not {value:g}")
        if not 0 < self.percentile < 1:
            raise InputError(f"the percentile of an SLO must be above 0 and below 1, such as 0.99: {self.percentile:g}")

    @property
    def may_wait(self) -> bool:
        """Whether requests of this class have no deadline: they go before batches, but set no limit to a step."""
        return self.name == FLEX

    @property
    def bounds(self) -> Bounds:
        return Bounds(*(math.inf if each is None else float(each) for each in (self.ttft_s, self.tpot_s, self.tbt_s)))


SloClasses = tuple[SloClass, ...]  # the strongest first
CLASSES = (
    SloClass(PRIORITY, ttft_s=1.0, tpot_s=0.05),
    SloClass(DEFAULT, ttft_s=1.0, tpot_s=0.05),
    SloClass(FLEX),
)


def strictest(classes: Iterable[SloClass]) -> Bounds:
    """Return the bounds that keep those of all these classes."""
    columns = zip(*(each.bounds for each in classes), strict=True)
    return Bounds(*map(min, columns))


@compiled
def deadline(bounds: Bounds, arrived_s: float, first_s: float, last_s: float, generated: int) -> float:
    """Return when the next token of a request is due.

    `first_s` and `last_s` are the times of the first and the last of its `generated` tokens. The pace counts from the
    first token, because that is how TPOT is measured: a first token that comes early leaves later ones no more time.
    """
    if generated == 0:
        return arrived_s + bounds.ttft_s
    return min(first_s + generated * bounds.tpot_s, last_s + bounds.tbt_s)


@compiled
def least_slack(
    bounds: Bounds, now_s: float, arrived_s: Floats, first_s: Floats, last_s: Floats, generated: Column
) -> float:
    """Return the least time until the next token of any of these requests is due, all columns by request."""
    least = np.inf
    for k in range(len(generated)):
        due = deadline(bounds, arrived_s[k], first_s[k], last_s[k], generated[k])
        least = min(least, due - now_s)
    return least
