"""A batch's life as stages of one line, with what interrupted it."""

from typing import Any

import pytest

from service.dashboard.shown import Shown
from service.dashboard.timeline import timeline
from service.queue.progress import Event
from tests.unit.dashboard.test_shown import NOW, batch

BEGUN = int(NOW) - 100
ENDED: dict[str, Any] = {"in_progress_at": BEGUN + 10, "finalizing_at": BEGUN + 90, "completed_at": BEGUN + 100}


def told(each: Shown, answers: dict[int, int], deaths: list[Event]) -> list[tuple[str, float]]:
    points = [[BEGUN + at, count, 0, 0, 0] for at, count in answers.items()]
    stages = timeline(each, points, deaths, NOW)
    assert sum(stage.width for stage in stages) == pytest.approx(1)
    return [(stage.name, stage.seconds) for stage in stages]


def test_the_stages_of_a_life_cover_all_of_it() -> None:
    completed = batch("completed", **ENDED)
    whole = [("checked", 10), ("waited", 20), ("answered", 60), ("results written", 10)]
    assert told(completed, {10: 0, 30: 1, 90: 2}, []) == whole
    assert not any(stage.is_open for stage in timeline(completed, [], [], NOW))


def test_the_last_stage_is_open_while_the_batch_lives() -> None:
    running = batch("running", in_progress_at=BEGUN + 10)
    *_, last = timeline(running, [], [], NOW)
    assert (last.name, last.seconds, last.is_open) == ("waited and answered", 90, True)
    *_, last = timeline(batch("waiting", counts=(0, 0), in_progress_at=BEGUN + 10), [], [], NOW)
    assert (last.name, last.is_open) == ("waited", True)
    waits = batch("waiting", in_progress_at=BEGUN + 10)
    assert told(waits, {30: 1, 60: 2}, [])[-2:] == [("answered", 30), ("waits again", 40)]


def test_a_held_batch_was_not_checked_all_the_time() -> None:
    preview = {"requests": 1, "prompt_sharing": 0.5, "compute_seconds": 1, "memory_seconds": 1, "planned_for": "x"}
    [first, *_] = timeline(batch("completed", about={"preview": preview}, **ENDED), [], [], NOW)
    assert first.name == "checked and held"
    held = batch("held", about={"preview": preview, "held": True}, counts=(0, 0), in_progress_at=BEGUN + 10)
    assert timeline(held, [], [], NOW)[-1].name == "held"


LONG: dict[str, Any] = {"created_at": BEGUN, "in_progress_at": BEGUN + 5, "finalizing_at": BEGUN + 190}
ENDED_LATE: dict[str, Any] = {**LONG, "completed_at": BEGUN + 200}


def interruptions(answers: dict[int, int], *died_at: int, **times: Any) -> list[tuple[float, float]]:
    """Begin and length of each, of a batch that ends after 200 s unless `times` say otherwise."""
    points = [[BEGUN + at, count, 0, 0, 0] for at, count in answers.items()]
    deaths = [Event(BEGUN + at, "death", f"w{at}") for at in died_at]
    batched = batch("completed", **{**ENDED_LATE, **times})
    stages = timeline(batched, points, deaths, NOW + 1000)
    assert sum(stage.width for stage in stages) == pytest.approx(1)
    return [(stage.begin - BEGUN, stage.seconds) for stage in stages if stage.key == "interrupted"]


def test_a_death_that_stops_the_answers_interrupts_them() -> None:
    # What was answered between the last point and the death is in the first point after it.
    answers = {10: 1, 20: 10, 30: 20, 40: 30, 50: 35, 90: 35, 100: 45, 190: 90}
    assert interruptions(answers, 45) == [(45, 45)]
    killed = Event(BEGUN + 45, "exit", "w", "SIGKILL: out of memory")
    points = [[BEGUN + at, count, 0, 0, 0] for at, count in answers.items()]
    told = timeline(batch("completed", **ENDED_LATE), points, [killed], NOW)
    assert [each.why for each in told if each.why] == ["w died: SIGKILL: out of memory"]


def test_deaths_together_are_one_interruption() -> None:
    answers = {10: 1, 20: 10, 30: 20, 40: 30, 50: 33, 130: 33, 140: 40, 190: 90}
    assert interruptions(answers, 41, 49, 60) == [(41, 89)]
    assert interruptions(dict(sorted({**answers, 150: 50, 180: 50}.items())), 45, 145) == [(45, 85), (145, 35)]


STEADY = {at: at for at in range(10, 200, 10)}


@pytest.mark.parametrize(
    ("answers", "died_at", "times"),
    [
        (STEADY, 41, {}),  # others answered on
        ({at: at for at in range(40, 200, 40)}, 60, {}),  # and of a long batch few points are kept
        (STEADY, 195, {}),  # all is answered, and the results are written
        ({10: 1, 20: 5}, 50, {"cancelling_at": BEGUN + 40}),  # it was being cancelled
        ({10: 0, 60: 5, 190: 9}, 20, {}),  # nothing was answered yet
        (STEADY, 205, {}),  # it had ended
        ({}, 50, {}),  # nobody knows: its points are gone
    ],
)
def test_a_death_beside_answers_interrupts_nothing(
    answers: dict[int, int], died_at: int, times: dict[str, Any]
) -> None:
    assert interruptions(answers, died_at, **times) == []


def test_an_interruption_of_a_batch_that_lives_is_open() -> None:
    running = batch("running", in_progress_at=BEGUN + 10)
    deaths = [Event(BEGUN + 50, "exit", "w"), Event(BEGUN + 70, "exit", "w")]
    assert told(running, {30: 5, 45: 8}, deaths)[-1] == ("interrupted", 50)
    assert [stage.is_open for stage in timeline(running, [[BEGUN + 30, 5, 0, 0, 0]], deaths, NOW)][-1]
