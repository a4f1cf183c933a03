"""The stages of a comparison on a GPU, without a GPU: limits, deaths, continuing, and what is counted."""

import argparse
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu import given, lease
from benchmarks.gpu import plan as plans
from benchmarks.gpu.agreement import compare
from benchmarks.gpu.plan import Group, Stage
from benchmarks.gpu.records import STAGES, Folder
from benchmarks.gpu.workloads import FAMILY, families
from benchmarks.traces import Row

PLAN = [Stage(name, Group.PROBE, limit_s=0.2, least_s=0.0) for name in ("a", "b", "c")]
# A process of stages: it ends each stage that its program does not stop in.
PROGRAM = """
import sys, time
from pathlib import Path
from benchmarks.gpu.records import Folder
folder = Folder(Path(sys.argv[1]))
for name in "abc":
    if name in folder.ended:
        continue
    folder.begins(name, 0.2)
    {}
    folder.ends(name, time.monotonic(), found=1)
"""


def run(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, in_stage: str, seconds: float = 60.0, grace_s: float = 3.0
) -> None:
    """Run the plan with processes that do this in each stage, whose name is `name`."""
    program = PROGRAM.format(in_stage)
    monkeypatch.setattr(lease, "command", lambda *_: [sys.executable, "-c", program, str(folder.path)])
    monkeypatch.setattr(lease, "GRACE_S", grace_s)
    lease.run(PLAN, folder, time.monotonic() + seconds)


def test_a_stage_that_hangs_is_killed_and_the_others_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path)
    run(folder, monkeypatch, "time.sleep(3600 if name == 'b' else 0)")
    assert {name: "failed" in each for name, each in folder.ended.items()} == {"a": False, "b": True, "c": False}
    assert "after its limit" in folder.ended["b"]["failed"]


def test_a_stage_whose_process_dies_fails_and_the_others_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path)
    run(folder, monkeypatch, "import os; name == 'a' and os.kill(os.getpid(), 9)")
    assert {name: "failed" in each for name, each in folder.ended.items()} == {"a": True, "b": False, "c": False}
    assert "ended with -9" in folder.ended["a"]["failed"]


def test_what_the_time_cuts_runs_when_it_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path)
    began = time.monotonic()
    run(folder, monkeypatch, "time.sleep(3600 if name == 'b' else 0)", seconds=5.0, grace_s=100.0)
    assert time.monotonic() - began < 60
    assert list(folder.ended) == ["a"]
    run(folder, monkeypatch, "pass")
    assert list(folder.ended) == ["a", "b", "c"]
    assert not any("failed" in each for each in folder.ended.values())


def test_what_cannot_start_is_given_up_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path)
    monkeypatch.setattr(lease, "command", lambda *_: [sys.executable, "-c", "import no_such_library"])
    lease.run(PLAN, folder, time.monotonic() + 60)
    assert [each["failed"] for each in folder.ended.values()] == [
        "it cannot start: ModuleNotFoundError: No module named 'no_such_library'"
    ] * len(PLAN)


def test_a_line_that_was_cut_off_costs_only_itself(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.begins("a", 1.0)
    with (tmp_path / STAGES).open("a") as file:
        file.write('{"stage": "a", "ev')
    folder.ends("a", time.monotonic())
    assert [each["event"] for each in folder.stages] == ["begins", "ends"]


def test_answers_may_differ_where_two_tokens_are_nearly_as_likely() -> None:
    near = [[(-0.10, 5, None), (-0.12, 6, None)]] * 3
    clear = [[(-0.1, 5, None), (-3.0, 6, None)]] * 3
    reference = {"metas": [{"output_top_logprobs": near}, {"output_top_logprobs": clear}], "answers": [[5, 5, 5]] * 2}
    assert compare(reference, [[5, 5, 5], [5, 5, 5]]) == {"agreed": 2, "near": 0, "wrong": 0}
    assert compare(reference, [[5, 6, 9], [5, 6, 9]]) == {"agreed": 0, "near": 1, "wrong": 1}
    assert compare(reference, [[5, 5], [5, 5, 5]]) == {"agreed": 1, "near": 0, "wrong": 1}


def test_small_families_stay_together_and_large_ones_are_thinned() -> None:
    rows = [Row([(f"document {k % 3}", 5000), (f"question {k}", 10)], 1, "t") for k in range(9)]
    rows += [Row([("exam", 900), (f"exam question {k}", 10)], 1, "t") for k in range(FAMILY + 1)]
    found = families(rows)
    assert sorted(map(str, found)) == sorted(map(str, rows))
    assert [row.segments[0][0] for row in found[:9]] == sorted(f"document {k}" for k in range(3) for _ in range(3))
    assert found[9:] == rows[9:]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give a folder with data, or --file"),
        (["no-such-folder"], "no-such-folder is not a folder"),
        (["--file", "no-such-file", "--model", "m"], "no-such-file is not a file"),
        (["--file", __file__], "--file needs --model"),
        ([".", "--model", "m"], "--model must be llama-3-8b or tiny"),
        ([".", "--emulated", "3", "--mixes", "m"], "--mixes: unknown 'm'"),
        ([".", "--emulated", "3", "--policies", "p"], "--policies: unknown 'p'"),
        ([".", "--emulated", "3", "--policies", "batchweave-nano"], "--policies: 'batchweave-nano' needs a GPU"),
        ([".", "--emulated", "3", "--stages", "smke"], "--stages: unknown 'smke'"),
        ([".", "--emulated", "3", "--seconds", "0"], "--seconds must be above 0"),
        ([".", "--emulated", "3", "--engine-args", "[]"], "--engine-args must be a JSON object"),
    ],
)
def test_what_makes_no_sense_is_said(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = given.parser(None)
    with pytest.raises(SystemExit):
        given.read(parser, parser.parse_args(arguments))
    assert said in capsys.readouterr().err


def plan_of(*arguments: str) -> list[str]:
    parser: argparse.ArgumentParser = given.parser(None)
    return [stage.name for stage in plans.plan_of(given.read(parser, parser.parse_args(arguments)))]


def test_the_same_command_continues(tmp_path: Path) -> None:
    parser = given.parser(None)
    asked = given.read(parser, parser.parse_args([".", "--emulated", "3", "--policies", "fcfs"]))
    Folder(tmp_path).keep(asked)
    assert Folder(tmp_path).asked == asked


def test_the_plan_has_what_was_asked_for() -> None:
    whole = plan_of(".", "--emulated", "3")
    assert whole[:7] == ["machine", "kernels", "overlap", "engine", "smoke", "calibrate", "documents batchweave-mixed"]
    assert whole[-1] == "online priority", "an emulated device has no streams"
    others = plan_of(".", "--model", "tiny", "--mixes", "mmlu", "--policies", "lpm,batchweave-nano")
    assert others[6:] == ["mmlu lpm", "nano engine", "mmlu batchweave-nano"]
    own = plan_of("--file", __file__, "--model", "m", "--emulated", "3")
    policies = ("fcfs", "dfs-8192", "dfs-8192-mixed", "batchweave-mixed")
    assert own == ["engine", "calibrate", *(f"file {name}" for name in policies)]
    assert plan_of(".", "--emulated", "3", "--stages", "smoke") == ["engine", "smoke"]
    assert plan_of(".", "--emulated", "3", "--stages", "machine") == ["machine"]
