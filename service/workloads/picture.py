"""Draws a plan: the prefix tree as an icicle coloured by density, and below it the scan from both ends."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PatchCollection
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from engine_ext.plan.window import WindowPlan

NARROWEST = 1 / 2000  # share of the width that a node needs to be drawn
BINS = 400
MOST_REPLICAS = 65  # above this, partitions are not marked
SPREAD = 100  # colours range from the window's density / SPREAD to density * SPREAD


def draw_plan(plan: WindowPlan, path: Path, title: str) -> None:
    """Draw a plan to a file, in the format that the file's suffix names."""
    figure = Figure(figsize=(12, 8), layout="constrained")
    FigureCanvasAgg(figure)
    icicle, scan = figure.subplots(2, 1, height_ratios=(3, 2))
    figure.suptitle(title.replace("$", r"\$"))
    root = plan.load.density if np.isfinite(plan.load.density) and plan.load.density > 0 else 1.0
    norm = LogNorm(root / SPREAD, root * SPREAD)
    _draw_tree(figure, icicle, plan, norm)
    _draw_scan(scan, plan, root)
    figure.savefig(path, dpi=130)


def _draw_tree(figure: Figure, axes: Any, plan: WindowPlan, norm: LogNorm) -> None:
    tree, density = plan.scan.tree, plan.scan.loads.density
    wide = np.flatnonzero((tree.last - tree.first >= max(1, NARROWEST * len(tree.order))) & (tree.end > tree.begin))
    boxes = [
        Rectangle((first, begin), last - first, end - begin)
        for first, last, begin, end in zip(
            tree.first[wide], tree.last[wide], tree.begin[wide], tree.end[wide], strict=True
        )
    ]
    drawn = PatchCollection(boxes, cmap="coolwarm", norm=norm, edgecolor="black", linewidth=0.2)
    drawn.set_array(np.clip(density[wide], norm.vmin, norm.vmax))
    axes.add_collection(drawn)
    axes.set_xlim(0, len(tree.order))
    axes.set_ylim(float(tree.end[wide].max(initial=1)), 0)
    axes.set_xlabel("requests, left to right as the scan sees them")
    axes.set_ylabel("depth in tokens")
    figure.colorbar(drawn, ax=axes, label="density: compute / memory")


def _draw_scan(axes: Any, plan: WindowPlan, root: float) -> None:
    """Draw the density of all requests so far, and of each interval by side, in order of execution."""
    compute, memory = plan.compute_s[plan.order], plan.memory_s[plan.order]
    edges = np.unique(np.linspace(0, len(plan.order), BINS + 1).astype(int))
    for side, color, name in ((False, "tab:red", "left end"), (True, "tab:blue", "right end")):
        chosen = plan.right == side
        sums = [np.concatenate([[0.0], np.cumsum(np.where(chosen, each, 0.0))])[edges] for each in (compute, memory)]
        taken, read = np.diff(sums[0]), np.diff(sums[1])
        with np.errstate(divide="ignore", invalid="ignore"):
            axes.plot(edges[1:], np.where(read > 0, taken / read, np.nan), ".", color=color, markersize=3, label=name)
    with np.errstate(divide="ignore", invalid="ignore"):
        so_far = np.cumsum(compute) / np.cumsum(memory)
    axes.plot(edges[1:], so_far[edges[1:] - 1], color="black", label="all so far")
    for begin in plan.partitions[1:-1].tolist() if len(plan.partitions) <= MOST_REPLICAS else []:
        axes.axvline(begin, color="black", linewidth=0.5)  # the start of the next replica's partition
    axes.axhline(root, color="grey", linestyle=":", label="window")
    axes.set_yscale("log")
    axes.set_xlim(0, len(plan.order))
    axes.set_xlabel("order of execution")
    axes.set_ylabel("density")
    axes.legend(loc="upper right", ncols=4, fontsize="small")
