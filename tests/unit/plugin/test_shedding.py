"""Whether an online request is refused, by what the schedulers foresee and what was sent to them since."""

import time

import pytest

from engine_ext.coserve.slo import DEFAULT, FLEX, PRIORITY, SloClass
from engine_ext.plugin.pulse import Beating, Foreseen, Pulses
from engine_ext.plugin.worker.shedding import Shedding

CLASSES = (SloClass(PRIORITY, 1.0, 0.05), SloClass(DEFAULT, 1.0, 0.05), SloClass(FLEX))


def shedding(*found: Foreseen, classes: tuple[SloClass, ...] = CLASSES) -> Shedding:
    pulses = Pulses()
    for slot, each in enumerate(found):
        Beating(pulses.path, slot, 0.0).foresaw(each)
    return Shedding(pulses, classes)


def foreseen(step_s: float = 0.01, priority_s: float = 0.0, default_s: float = 0.0) -> Foreseen:
    return Foreseen(time.monotonic(), step_s, 1e-4, priority_s, default_s)


def refused(held: Shedding) -> list[str]:
    return [slo for slo in (PRIORITY, DEFAULT, FLEX) if held.refusal(slo, 0) is not None]


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
        ([foreseen(default_s=5.0), foreseen()], []),
    ],
)
def test_the_weakest_are_refused_first(found: list[Foreseen], classes: list[str]) -> None:
    assert refused(shedding(*found)) == classes


def test_a_burst_is_seen_before_the_next_step() -> None:
    held = shedding(foreseen())
    tokens = 0
    while held.refusal(DEFAULT, 4 * 1000) is None:
        tokens += 1000
    assert tokens == 11_000  # 1.1 s at 0.1 ms a token
    assert "would wait 1.1 s for its first token, where 1 s is the limit" in str(held.refusal(DEFAULT, 0))


def test_who_keeps_no_bounds_refuses_nobody() -> None:
    assert refused(shedding(foreseen(step_s=9.0, default_s=9.0), classes=(*CLASSES[:1], SloClass(), CLASSES[2]))) == [
        PRIORITY
    ]
