"""Whether an online request is refused, by what the schedulers foresee and what was sent to them since."""

import time

import pytest

from engine_ext.coserve.slo import DEFAULT, FLEX, PRIORITY, SloClass
from engine_ext.plugin.pulse import Beating, Foreseen, Pulses
from engine_ext.plugin.worker.shedding import Shedding

LONGEST = 50_000
CLASSES = (SloClass(PRIORITY, 1.0, 0.05), SloClass(DEFAULT, 1.0, 0.05), SloClass(FLEX))


def shedding(*found: Foreseen, classes: tuple[SloClass, ...] = CLASSES) -> Shedding:
    pulses = Pulses()
    for slot, each in enumerate(found):
        Beating(pulses.path, slot, 0.0).foresaw(each)
    return Shedding(pulses, classes, LONGEST)


def foreseen(step_s: float = 0.01, priority_s: float = 0.0, default_s: float = 0.0) -> Foreseen:
    return Foreseen(time.monotonic(), step_s, 1e-4, priority_s, default_s)


def refused(held: Shedding) -> list[str]:
    return [slo for slo in (PRIORITY, DEFAULT, FLEX) if held.refusal(slo) is not None]


@pytest.mark.parametrize(
    ("found", "classes"),
    [
        ([], []),
        ([foreseen()], []),
        ([foreseen(default_s=0.6)], [FLEX]),
        ([foreseen(default_s=1.1)], [DEFAULT, FLEX]),
        ([foreseen(priority_s=1.1, default_s=1.2)], [PRIORITY, DEFAULT, FLEX]),
        ([foreseen(step_s=0.03)], [FLEX]),
        ([foreseen(step_s=0.06)], [PRIORITY, DEFAULT, FLEX]),
        ([foreseen(default_s=5.0), foreseen()], [DEFAULT, FLEX]),
        ([foreseen(default_s=1.5), foreseen()], [FLEX]),
    ],
)
def test_the_weakest_are_refused_first(found: list[Foreseen], classes: list[str]) -> None:
    assert refused(shedding(*found)) == classes


def test_a_burst_is_seen_before_the_next_step() -> None:
    """Prompts of weaker classes come after a new one, and do not count."""
    held, tokens = shedding(foreseen()), 0
    held.sent(FLEX, 10**9)
    while held.refusal(DEFAULT) is None:
        held.sent(DEFAULT, 4 * 1000)
        tokens += 1000
    assert tokens == 11_000  # 1.1 s at 0.1 ms a token
    assert "would wait 1.1 s for its first token, where 1 s is the limit" in str(held.refusal(DEFAULT))
    assert held.refusal(PRIORITY) is None
    held.sent(PRIORITY, 10**9)
    assert f"would wait {LONGEST / 1e4:.1f} s" in str(held.refusal(PRIORITY)), "no prompt is longer than the context"


def test_who_never_reached_a_scheduler_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step tells of a request that was refused on its way; it would count until the next one comes, for ever."""
    held = shedding(foreseen())
    held.sent(DEFAULT, 10**6)
    assert held.refusal(DEFAULT) is not None
    monkeypatch.setattr("engine_ext.plugin.worker.shedding.UNSEEN_S", 0.0)
    assert held.refusal(DEFAULT) is None


def test_what_a_scheduler_has_seen_counts_no_more() -> None:
    pulses = Pulses()
    beating, held = Beating(pulses.path, 0, 0.0), Shedding(pulses, CLASSES, LONGEST)
    beating.foresaw(foreseen())
    held.sent(DEFAULT, 10**6)
    assert held.refusal(DEFAULT) is not None
    beating.foresaw(foreseen())
    assert held.refusal(DEFAULT) is None


def test_a_weaker_class_is_refused_where_it_would_break_what_a_stronger_one_has() -> None:
    classes = (SloClass(PRIORITY, 1.0, 0.03), *CLASSES[1:])
    assert refused(shedding(foreseen(step_s=0.04), classes=classes)) == [PRIORITY, DEFAULT, FLEX]


def test_a_class_without_bounds_is_never_refused_nor_is_flex_then() -> None:
    classes = (SloClass(PRIORITY), SloClass(DEFAULT), SloClass(FLEX))
    assert refused(shedding(foreseen(step_s=9.0, priority_s=9.0, default_s=9.0), classes=classes)) == []
