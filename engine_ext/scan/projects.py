"""Counts what an engine computes and reads for each project, so that deadlines take no more than a project's share.

Start-time fair queueing: a project's virtual time advances by the work done for it divided by its weight, and one that
comes starts level with the others. Who is ahead is not hurried any more, whatever its deadlines are.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from engine_ext.arrays import Bools, Column, Floats
from engine_ext.scan.tuning import AHEAD_S, PROJECTS_KNOWN


class Owner(NamedTuple):
    """Whose a request is: a number of its project, and the project's weight beside the others."""

    project: int = 0
    weight: float = 1.0


NOBODY = Owner()


@dataclass(slots=True)
class ProjectTimes:
    """The virtual time of each project, in seconds of the cost model."""

    _times: dict[int, float] = field(default_factory=dict[int, float])

    def charge(self, projects: Column, work_s: Floats) -> None:
        """Count work; `work_s`: seconds divided by the project's weight, for each of `projects`."""
        which, at = np.unique(projects, return_inverse=True)
        for project, seconds in zip(which.tolist(), np.bincount(at, work_s).tolist(), strict=True):
            self._times[project] = self._times.get(project, 0.0) + seconds

    def ahead(self, projects: Column, runs: Bools, slowness: float) -> Bools:
        """Return which of these requests are of a project that had more than its share; bool [requests].

        `projects`: those of the requests that wait or run. `runs`: which of them run. A project of which none waits is
        behind nobody. `slowness`: seconds that the engine takes for a second of the cost model.
        """
        which, at = np.unique(projects, return_inverse=True)
        waits = np.bincount(at, ~runs) > 0
        here = which.tolist()
        level = min((self._times[each] for each in here if each in self._times), default=0.0)
        if len(self._times) > PROJECTS_KNOWN:
            self._times = {each: self._times[each] for each in here if each in self._times}
        for project in here:
            self._times[project] = max(self._times.get(project, level), level)
        times = np.array([self._times[each] for each in here])
        least = times[waits].min(initial=np.inf)
        return ((times - least) * slowness > AHEAD_S)[at]
