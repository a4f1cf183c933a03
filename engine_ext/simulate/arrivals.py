"""Makes arrivals of online requests for a simulation: those of a trace, thinned or repeated to a load."""

from dataclasses import dataclass

import numpy as np

from engine_ext.arrays import Column, Floats
from engine_ext.errors import InputError


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Which request of a trace arrives when: `arrives_s` ascends, `number` is its place in the trace.

    `copy`: which copy of the trace it is from, where the trace is laid over itself to reach the load. A request of a
    later copy has the lengths of the first, and a prompt of its own.
    """

    arrives_s: Floats
    number: Column
    copy: Column
    duration_s: float

    def __len__(self) -> int:
        return len(self.number)

    @property
    def rate(self) -> float:
        """The requests per second."""
        return len(self) / self.duration_s


def at_rate(arrives_s: Floats, rate: float, duration_s: float, generator: np.random.Generator) -> Arrivals:
    """Return arrivals of about `rate` requests a second for `duration_s`, in the trace's rhythm.

    A lower rate than the trace's thins it; a higher one lays shifted copies of it over each other, each of which wraps
    around (OOCO 5.1.3). `arrives_s`: seconds since the trace began, ascending. Raises InputError.
    """
    if len(arrives_s) == 0 or rate <= 0 or duration_s <= 0:
        raise InputError("arrivals need at least one request, a rate above 0 and a duration above 0")
    if np.any(np.diff(arrives_s) < 0) or arrives_s[0] < 0:
        raise InputError("arrivals must ascend from 0 seconds on")
    whole_s = max(float(arrives_s[-1]), 1e-9)
    own_rate = len(arrives_s) / whole_s
    copies = int(np.ceil(rate / own_rate))
    times, numbers, which = list[Floats](), list[Column](), list[Column]()
    for copy in range(copies):
        shift = whole_s * copy / copies
        moved = (arrives_s + shift) % whole_s
        keep = (generator.random(len(moved)) < rate / own_rate / copies) & (moved < duration_s)
        times.append(moved[keep])
        numbers.append(np.flatnonzero(keep))
        which.append(np.full(int(keep.sum()), copy))
    arrives, number, copied = np.concatenate(times), np.concatenate(numbers), np.concatenate(which)
    order = np.argsort(arrives, kind="stable")
    return Arrivals(arrives[order], number[order], copied[order], min(duration_s, whole_s))


def denser(arrivals: Arrivals, begin_s: float, end_s: float, factor: int, generator: np.random.Generator) -> Arrivals:
    """Return the arrivals with `factor` times as many between two times: each comes again within a second."""
    inside = (arrivals.arrives_s >= begin_s) & (arrivals.arrives_s < end_s)
    times, numbers, copies = [arrivals.arrives_s], [arrivals.number], [arrivals.copy]
    for again in range(1, factor):
        jitter = generator.uniform(0.0, 1.0, int(inside.sum()))
        times.append(np.minimum(arrivals.arrives_s[inside] + jitter, end_s))
        numbers.append(arrivals.number[inside])
        copies.append(arrivals.copy[inside] + again * (int(arrivals.copy.max(initial=0)) + 1))
    arrives = np.concatenate(times)
    order = np.argsort(arrives, kind="stable")
    return Arrivals(arrives[order], np.concatenate(numbers)[order], np.concatenate(copies)[order], arrivals.duration_s)
