"""What a batch's progress prints without a terminal."""

import itertools

import pytest

from batchweave.remote.progress_lines import LAST_LINE_S, ProgressLines


def test_a_state_is_printed_when_it_changes_and_then_ever_less_often(capfd: pytest.CaptureFixture[str]) -> None:
    lines = ProgressLines()
    for second in range(40):
        lines.tell(f"waiting for a worker: it has been starting for {second} s", "", float(second))
    for second in range(40, 40 + 3600):
        lines.tell("is in progress", f"{second} of 5,000 done", float(second))
    printed = capfd.readouterr().err.splitlines()
    assert [line.split("for ")[-1] for line in printed[:3]] == ["0 s", "10 s", "30 s"]
    pauses = [10, 20, 40, 80, 160, *[int(LAST_LINE_S)] * 10]
    shown = [int(line.split(": ")[1].split()[0]) for line in printed[3:]]
    assert [after - before for before, after in itertools.pairwise(shown)] == pauses
