"""A batch's life as the stages of one line, with the interruptions by deaths of workers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from service.dashboard.charts import EVENT_WORDS
from service.dashboard.shown import Shown
from service.queue.progress import Event

LEAST_S = 15  # of an interruption: progress is noted each 10 s


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a batch's life. `left` and `width` are shares of the whole; `seconds` is how long it took.

    `why`: of an interruption, what died and how.
    """

    name: str
    key: str
    begin: float
    seconds: float
    left: float = 0.0
    width: float = 0.0
    is_open: bool = False
    why: str = ""


Points = Sequence[Sequence[int]]  # History.batch_points
Mark = tuple[str, str, float | None, str]  # a stage's name, key, begin and why


def timeline(each: Shown, points: Points, deaths: Sequence[Event], now: float) -> list[Stage]:
    """Return the stages of a batch's life. The last one is open while the batch lives.

    `points`: of its progress, maybe none; `deaths`: those of workers that may have run it.
    """
    batch, end = each.batch, each.ended_at
    answered_at = [point[0] for point in points if _answered(point)]
    first, last_answer = (answered_at[0], answered_at[-1]) if answered_at else (None, None)
    checked = "checked" if batch.batchweave.preview is None else "checked and held"
    marks: list[Mark] = [
        (checked, "checked", batch.created_at, ""),
        (*_began(each, first), batch.in_progress_at, ""),
        ("answered", "answered", first, ""),
        # Its worker died, or others come first.
        ("waits again", "waited", last_answer if each.state == "waiting" else None, ""),
        ("cancelled", "written", batch.cancelling_at, ""),
        ("results written", "written", batch.finalizing_at, ""),
        *_interruptions(points, deaths, min(filter(None, (batch.cancelling_at, batch.finalizing_at, end, now)))),
    ]
    begun = sorted(((at, name, key, why) for name, key, at, why in marks if at is not None), key=lambda mark: mark[0])
    last = max(end if end is not None else now, begun[-1][0])
    whole = max(last - batch.created_at, 1e-9)
    ends = [mark[0] for mark in begun[1:]] + [last]
    found = [
        Stage(name, key, at, until - at, (at - batch.created_at) / whole, (until - at) / whole, why=why)
        for (at, name, key, why), until in zip(begun, ends, strict=True)
    ]
    if end is None:
        found[-1] = replace(found[-1], is_open=True)
    return found


def _began(each: Shown, first_answer_at: float | None) -> tuple[str, str]:
    """Return the name and key of the stage after the check; when the first answer came may be unknown."""
    if each.batch.batchweave.held:
        return "held", "waited"
    return ("waited", "waited") if first_answer_at or not each.done else ("waited and answered", "answered")


def _interruptions(points: Points, deaths: Sequence[Event], last: float) -> list[Mark]:
    """Return the rests that began with a death, and what came after each, as marks.

    Deaths count while answers come: after the first, and before `last`. A death that others worked through is none.
    """
    found = list[Mark]()
    until = 0.0
    usual_s = _usual_gap(points)
    for death in sorted(deaths, key=lambda event: event.at):
        if not any(_answered(point) for point in points if point[0] <= death.at) or not until <= death.at < last:
            continue  # nothing was answered yet, or it is part of the one before
        end = _end_of_rest(points, death.at, usual_s)
        if (until_then := last if end is None else end) - death.at < LEAST_S:
            continue
        until = until_then
        what = f"{death.name} {EVENT_WORDS[death.kind]}"
        found.append(("interrupted", "interrupted", death.at, ": ".join(filter(None, (what, death.words)))))
        found.append(("answered", "answered", None if end is None else end, ""))
    return found


def _end_of_rest(points: Points, at: float, usual_s: float) -> float | None:
    """Return until when nothing was answered after a time, which is that time if something was; None: until now.

    What was answered just before it is in the first point after it. A long rest has a point at its end; where points
    have been thinned, a gap much longer than usual says the same.
    """
    later = [point for point in points if point[0] >= at]
    if not later:
        return None
    first = later[0]
    same = [point for point in later if _answered(point) == _answered(first)]
    if len(same) == len(later):
        return None
    if len(same) > 1:
        return same[-1][0]
    after = later[1][0]
    return after if after - first[0] > 2 * usual_s + LEAST_S else at


def _usual_gap(points: Points) -> float:
    gaps = sorted(after[0] - before[0] for before, after in pairwise(points))
    return gaps[len(gaps) // 2] if gaps else 0.0


def _answered(point: Sequence[int]) -> int:
    return point[1] + point[2]
