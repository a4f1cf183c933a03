"""A picture of a window's prefix tree and of its scan, small enough to draw on a page; stored beside the plan."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine_ext.plan.prompts import Prompts
from engine_ext.plan.tree import PrefixTree
from engine_ext.plan.window import WindowPlan

MOST_BOXES = 800
TEXT_TOKENS = 48  # of a shared prefix that are shown as text


@dataclass(frozen=True, slots=True)
class Content:
    """What the requests of a window say and whose they are.

    `owner` is int64 [prompts], the place of each request's project in `projects`. `decode` turns lists of token ids
    into texts.
    """

    prompts: Prompts
    projects: list[str]
    owner: NDArray[np.int64]
    decode: Callable[[list[list[int]]], list[str]]


class Box(msgspec.Struct, frozen=True, array_like=True):
    """A node of the tree.

    `left`, `width`: its requests, as shares of the whole width; `begin`, `end`: its tokens, by depth; `density`: its
    density relative to the window's, as log10. `output_tokens`: expected of one of its requests. `text`: how its tokens
    begin, which only the projects whose requests are in it may see; it is stored apart, to be deleted with the input
    files. `owners`: those projects, as places in the
    picture's `projects`, each with the number of its requests.
    """

    left: float
    width: float
    begin: int
    end: int
    density: float
    output_tokens: int = 0
    text: str = ""
    owners: tuple[tuple[int, int], ...] = ()


class PlanPicture(msgspec.Struct, frozen=True):
    """A drawing of a window's prefix tree. `boxes`: its widest nodes, left to right as the scan sees them.

    `reach`: by slice, how far the scan has come when the slice is done: the shares of the width taken from the left end
    and from the right end.
    """

    requests: int
    depth: int
    boxes: list[Box]
    reach: list[tuple[float, float]]
    projects: list[str] = []


def picture_of(plan: WindowPlan, content: Content) -> tuple[PlanPicture, list[str]]:
    """Return the picture of a plan without texts, and the texts of its boxes."""
    tree, count = plan.scan.tree, len(plan.order)
    width = tree.last - tree.first
    seen = np.flatnonzero((tree.end > tree.begin) & (width * 2 * MOST_BOXES >= count))
    chosen = np.sort(seen[np.argsort(-width[seen], kind="stable")[:MOST_BOXES]])
    with np.errstate(divide="ignore", invalid="ignore"):
        density = np.log10(plan.scan.loads.density[chosen] / plan.load.density)
    density = np.clip(np.nan_to_num(density, nan=0.0, posinf=2.0, neginf=-2.0), -2.0, 2.0)
    expected = np.concatenate([[0.0], np.cumsum(plan.estimates.mean[tree.order])])
    texts = content.decode([_tokens(content.prompts, tree, node) for node in chosen.tolist()])
    boxes = [
        Box(
            round(first / count, 5),
            round((last - first) / count, 5),
            begin,
            end,
            round(value, 2),
            round((expected[last] - expected[first]) / (last - first)),
            owners=_owners(content.owner[tree.order[first:last]]),
        )
        for first, last, begin, end, value in zip(
            tree.first[chosen].tolist(),
            tree.last[chosen].tolist(),
            tree.begin[chosen].tolist(),
            tree.end[chosen].tolist(),
            density.tolist(),
            strict=True,
        )
    ]
    right = np.concatenate([[0], np.cumsum(plan.right)])
    ends = [each.first + each.count for each in plan.slices]
    reach = [(round((end - int(right[end])) / count, 5), round(int(right[end]) / count, 5)) for end in ends]
    depth = max((box.end for box in boxes), default=1)
    return PlanPicture(count, depth, boxes, reach, content.projects), texts


def _owners(of: NDArray[np.int64]) -> tuple[tuple[int, int], ...]:
    projects, counts = np.unique(of, return_counts=True)
    return tuple(zip(projects.tolist(), counts.tolist(), strict=True))


def _tokens(prompts: Prompts, tree: PrefixTree, node: int) -> list[int]:
    """Return the first tokens of those that the requests below this node share, from one of them."""
    start = prompts.starts[tree.order[tree.first[node]]]
    end = min(tree.end[node], tree.begin[node] + TEXT_TOKENS)
    return prompts.tokens[start + tree.begin[node] : start + end].tolist()
