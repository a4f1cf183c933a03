"""A picture of a window's prefix tree and of its scan, small enough to draw on a page; stored beside the plan."""

import msgspec
import numpy as np

from engine_ext.plan.window import WindowPlan

MOST_BOXES = 800


class Box(msgspec.Struct, frozen=True, array_like=True):
    """A node of the tree.

    `left`, `width`: its requests, as shares of the whole width; `begin`, `end`: its tokens, by depth; `density`: its
    density relative to the window's, as log10.
    """

    left: float
    width: float
    begin: int
    end: int
    density: float


class PlanPicture(msgspec.Struct, frozen=True):
    """A drawing of a window's prefix tree. `boxes`: its widest nodes, left to right as the scan sees them.

    `reach`: by slice, how far the scan has come when the slice is done: the shares of the width taken from the left end
    and from the right end.
    """

    requests: int
    depth: int
    boxes: list[Box]
    reach: list[tuple[float, float]]


def picture_of(plan: WindowPlan) -> PlanPicture:
    """Return the picture of a plan."""
    tree, count = plan.scan.tree, len(plan.order)
    width = tree.last - tree.first
    seen = np.flatnonzero((tree.end > tree.begin) & (width * 2 * MOST_BOXES >= count))
    chosen = np.sort(seen[np.argsort(-width[seen], kind="stable")[:MOST_BOXES]])
    with np.errstate(divide="ignore", invalid="ignore"):
        density = np.log10(plan.scan.loads.density[chosen] / plan.load.density)
    density = np.clip(np.nan_to_num(density, nan=0.0, posinf=2.0, neginf=-2.0), -2.0, 2.0)
    boxes = [
        Box(round(first / count, 5), round(wide / count, 5), begin, end, round(value, 2))
        for first, wide, begin, end, value in zip(
            tree.first[chosen].tolist(),
            width[chosen].tolist(),
            tree.begin[chosen].tolist(),
            tree.end[chosen].tolist(),
            density.tolist(),
            strict=True,
        )
    ]
    right = np.concatenate([[0], np.cumsum(plan.right)])
    ends = [each.first + each.count for each in plan.slices]
    reach = [(round((end - int(right[end])) / count, 5), round(int(right[end]) / count, 5)) for end in ends]
    return PlanPicture(count, max((box.end for box in boxes), default=1), boxes, reach)
