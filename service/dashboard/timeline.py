"""A batch's life as the stages of one line, with the interruptions by deaths of workers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

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


def timeline(each: Shown, points: Sequence[Sequence[int]], deaths: Sequence[Event], now: float) -> list[Stage]:
    """Return the stages of a batch's life. The last one is open while the batch lives.

    `points`: its points of progress (`History.batch_points`), maybe none; `deaths`: those that may have interrupted it.
    """
    batch, end = each.batch, each.ended_at
    answered_at = [point[0] for point in points if _answered(point)]
    first, last_answer = (answered_at[0], answered_at[-1]) if answered_at else (None, None)
    checked = "checked" if batch.batchweave.preview is None else "checked and held"
    marks = [
        (checked, "checked", batch.created_at, ""),
        (*_began(each, first), batch.in_progress_at, ""),
        ("answered", "answered", first, ""),
        # Its worker died, or others come first.
        ("waits again", "waited", last_answer if each.state == "waiting" else None, ""),
        ("cancelled", "written", batch.cancelling_at, ""),
        ("results written", "written", batch.finalizing_at, ""),
        *_interruptions(points, deaths, now if end is None else end),
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
    return ("waited", "waited") if first_answer_at or not each.done else ("waited and answered", "answered")


def _interruptions(
    points: Sequence[Sequence[int]], deaths: Sequence[Event], last: float
) -> list[tuple[str, str, float | None, str]]:
    """Return the times between a death and the next answer, if they are long, and what came after each, as marks.

    One that others worked through is none: then answers came as before.
    """
    found = list[tuple[str, str, float | None, str]]()
    until = 0.0
    for death in sorted(deaths, key=lambda event: event.at):
        before = [point for point in points if point[0] <= death.at]
        if death.at < until or not before or death.at >= last:
            continue  # it is part of the one before, or nothing ran
        had = _answered(before[-1])
        until = next((point[0] for point in points if point[0] > death.at and _answered(point) > had), last)
        if until - death.at >= LEAST_S:
            what = f"{death.name} {EVENT_WORDS[death.kind]}"
            found.append(("interrupted", "interrupted", death.at, ": ".join(filter(None, (what, death.words)))))
            found.append(("answered", "answered", until if until < last else None, ""))
    return found


def _answered(point: Sequence[int]) -> int:
    return point[1] + point[2]
