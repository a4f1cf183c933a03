"""Draws simulated policies: how long each takes, and how compute and memory reads share its time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from service.workloads.forecast import Outcome

POINTS = 150  # per line
COMPUTE, READS = "#c0504d", "#4472a8"


def draw_race(outcomes: Sequence[Outcome], path: Path, title: str) -> None:
    """Draw the policies to a file, in the format that the file's suffix names."""
    figure = Figure(figsize=(11, 1.2 + 1.5 * len(outcomes)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title.replace("$", r"\$"))
    longest = max(outcome.seconds for outcome in outcomes)
    panels = np.atleast_1d(figure.subplots(len(outcomes), 1, sharex=True))
    for axes, outcome in zip(panels, outcomes, strict=True):
        draw_shares(axes, outcome.series)
        axes.set_xlim(0, longest / 3600)
        hours, share = outcome.seconds / 3600, outcome.share_of_practical
        axes.set_title(f"{outcome.policy}: {hours:.3g} h, {share:.1%} of the practical bound", fontsize=9, loc="left")
    panels[-1].set_xlabel("hours")
    figure.savefig(path, dpi=130)


def draw_shares(axes: Any, series: NDArray[np.float64]) -> None:
    """Draw the share of time that compute and memory reads take.

    `series` has a row for each interval of steps: seconds, compute and reads, [intervals, 3].
    """
    ends = np.cumsum(series[:, 0])
    edges = np.linspace(0, ends[-1] if len(ends) else 0.0, POINTS + 1)
    sums = np.vstack([np.zeros(3), np.cumsum(series, axis=0)])
    parts = np.diff([np.interp(edges, np.concatenate([[0.0], ends]), sums[:, column]) for column in (1, 2)], axis=1)
    width = max(edges[1] - edges[0], 1e-12)
    hours = (edges[:-1] + edges[1:]) / 2 / 3600
    axes.plot(hours, parts[0] / width, color=COMPUTE, label="compute")
    axes.plot(hours, parts[1] / width, color=READS, label="memory reads")
    axes.set_ylim(0, 1.05)
    axes.set_ylabel("share of time", fontsize=8)
    axes.legend(loc="lower left", fontsize=7, ncols=2)
