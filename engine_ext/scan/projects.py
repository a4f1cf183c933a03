"""Counts what an engine computes and reads for each project, so that deadlines take no more than a project's share.

Start-time fair queueing: a project's virtual time advances by the work done for it divided by its weight. One that
begins to wait starts level with those that waited before: it has not saved up any turns.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from engine_ext.arrays import Bools, Column, Floats
from engine_ext.scan.tuning import AHEAD_S, MOST_BEHIND_S, PROJECTS_KNOWN

NOT_AHEAD = -1


class Owner(NamedTuple):
    """Whose a request is: a number of its project, and the project's weight beside the others."""

    project: int = 0
    weight: float = 1.0


NOBODY = Owner()


@dataclass(slots=True)
class ProjectTimes:
    """The virtual time of each project, in seconds of the cost model."""

    _times: dict[int, float] = field(default_factory=dict[int, float])
    _waited: Collection[int] = ()  # the projects that waited at the last look
    _level: float = 0.0  # with which who begins to wait starts; never falls

    def charge(self, projects: Column, work_s: Floats) -> None:
        """Count work; `work_s`: seconds divided by the project's weight, for each of `projects`."""
        which, at = np.unique(projects, return_inverse=True)
        for project, seconds in zip(which.tolist(), np.bincount(at, work_s).tolist(), strict=True):
            self._times[project] = self._times.get(project, self._level) + seconds

    def ahead(self, projects: Column, slowness: float) -> Column:
        """Return, of each waiting request, its project if that had more than its share, otherwise NOT_AHEAD.

        `projects`: those of the requests that wait; int64 [requests], as is the result. `slowness`: seconds that the
        engine takes for a second of the cost model.
        """
        which, at = np.unique(projects, return_inverse=True)
        here = which.tolist()
        self._level = max(self._level, min((self._times[each] for each in here if each in self._waited), default=0.0))
        times = np.array([max(self._times.get(each, 0.0), self._level) for each in here])
        # Who waits with little to do saves up no more than this.
        times = np.maximum(times, times.max(initial=0.0) - MOST_BEHIND_S / slowness)
        if len(self._times) > PROJECTS_KNOWN:
            self._times.clear()
        self._times |= zip(here, times.tolist(), strict=True)
        self._waited = set(here)
        is_ahead: Bools = (times - times.min(initial=np.inf)) * slowness > AHEAD_S
        return np.where(is_ahead, which, NOT_AHEAD)[at]
