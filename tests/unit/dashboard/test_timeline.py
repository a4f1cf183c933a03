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


def test_a_death_that_stops_the_answers_interrupts_them() -> None:
    completed = batch("completed", **ENDED)
    killed = Event(BEGUN + 40, "exit", "w", "SIGKILL: out of memory")
    answers = {10: 0, 30: 5, 38: 8, 70: 8, 75: 20, 90: 30}
    assert told(completed, answers, [killed])[2:] == [
        ("answered", 10),
        ("interrupted", 35),
        ("answered", 15),
        ("results written", 10),
    ]
    points = [[BEGUN + at, count, 0, 0, 0] for at, count in answers.items()]
    [why] = [each.why for each in timeline(completed, points, [killed], NOW) if each.key == "interrupted"]
    assert why == "w died: SIGKILL: out of memory"


@pytest.mark.parametrize(
    ("answers", "died_at"),
    [
        ({10: 0, 30: 5, 40: 8, 50: 12, 90: 30}, 41),  # others answered on
        ({10: 0, 30: 5, 90: 30}, 101),  # it had ended
        ({10: 0, 30: 5, 90: 30}, 5),  # it had not begun
        ({}, 50),  # nobody knows: its points are gone
    ],
)
def test_a_death_beside_answers_interrupts_nothing(answers: dict[int, int], died_at: int) -> None:
    found = told(batch("completed", **ENDED), answers, [Event(BEGUN + died_at, "death", "w")])
    assert "interrupted" not in [name for name, _ in found]


def test_deaths_in_one_interruption_are_one_and_it_may_be_open() -> None:
    running = batch("running", in_progress_at=BEGUN + 10)
    deaths = [Event(BEGUN + 50, "exit", "w"), Event(BEGUN + 70, "exit", "w")]
    assert told(running, {30: 5, 45: 8}, deaths)[-1] == ("interrupted", 50)
