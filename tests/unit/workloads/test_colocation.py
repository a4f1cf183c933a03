"""`profile-slo`, and rivals beside it (`benchmarks.simulate --online`): rows, and one clear error for bad input."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from batchweave.table import command_line
from benchmarks.simulate.__main__ import app
from benchmarks.simulate.rows import FIELDS
from engine_ext.simulate.contest import CHUNKS
from service.errors import SettingsError
from service.estimates.slo_file import read_slo_file


def profile_slo(*arguments: object) -> Result:
    return CliRunner().invoke(command_line("profile-slo"), ["profile-slo", *(str(each) for each in arguments)])


def compared(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments])


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """One file with both classes, and one with a batch alone."""
    generator = np.random.default_rng(0)
    both, batch = tmp_path / "both.jsonl", tmp_path / "batch.jsonl"
    chats: list[dict[str, Any]] = [
        {
            "segments": [["system", 50], [f"chat {k}", int(generator.integers(20, 900))]],
            "output_tokens": int(generator.integers(2, 60)),
            "arrival_s": float(time),
            "class": "online",
        }
        for k, time in enumerate(generator.uniform(0, 10, 60))
    ]
    rows: list[dict[str, Any]] = [
        {"segments": [[f"document {k % 20}", 400], [k, 300]], "output_tokens": 40, "class": "batch"}
        for k in range(3000)
    ]
    both.write_text("".join(json.dumps(line) + "\n" for line in [*rows[:50], *chats]))
    batch.write_text("".join(json.dumps(line) + "\n" for line in rows))
    return both, batch


@pytest.mark.slow
def test_each_policy_gets_a_row(files: tuple[Path, Path]) -> None:
    online, offline = files
    said = ("--policies", "online-only,priority,batchweave", "--load", 0.2, "--json")
    found = compared("--online", online, "--offline", offline, *said)
    assert found.exit_code == 0, found.output
    rows = json.loads(found.stdout)
    assert [row["policy"] for row in rows] == ["online-only", "priority", "batchweave"]
    assert all(tuple(row) == FIELDS for row in rows)
    assert rows[0]["offline_tokens_per_s"] == 0
    assert rows[2]["offline_tokens_per_s"] > 0
    assert rows[2]["load"] == pytest.approx(0.2, rel=0.3)


@pytest.mark.slow
def test_two_engines_are_compared_in_pools_and_side_by_side(files: tuple[Path, Path]) -> None:
    online, offline = files
    said = ("--pools", "strict:1,relaxed:1", "--policies", "base-pd,ooco,batchweave,online-only", "--json")
    found = compared("--online", online, "--offline", offline, *said)
    assert found.exit_code == 0, found.output
    rows = json.loads(found.stdout)
    assert [row["policy"] for row in rows] == ["base-pd", "ooco", "batchweave", "online-only"]
    assert all(tuple(row) == FIELDS for row in rows)
    assert all(row["offline_tokens_per_s"] > 0 for row in rows[:3])


@pytest.mark.slow
def test_a_profile_is_read_by_a_worker(files: tuple[Path, Path], tmp_path: Path) -> None:
    online, offline = files
    output = tmp_path / "slo.json"
    said = ("--relative", "mean_tbt=0.05", "--slo", "ttft=1,tpot=0.05", "--output", output)
    found = profile_slo("--online", online, "--offline", offline, *said)
    assert found.exit_code == 0, found.output
    (priority, slo, flex), limits = read_slo_file(output)
    assert (priority.name, slo.name, flex.name) == ("priority", "default", "flex")
    assert (priority.bounds, flex.ttft_s) == (slo.bounds, None)
    assert (slo.ttft_s, slo.tpot_s, slo.percentile) == (1.0, 0.05, 0.99)
    assert limits.limit_s is not None or limits.price_s is not None
    assert limits.prompt_tokens in CHUNKS


def test_priority_may_have_bounds_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "slo.json"
    path.write_text('{"slo": {"ttft_s": 1, "tpot_s": 0.05}, "priority": {"ttft_s": 0.3, "tpot_s": 0.03}}')
    (priority, slo, _), _ = read_slo_file(path)
    assert (priority.ttft_s, priority.tpot_s, slo.ttft_s, slo.tpot_s) == (0.3, 0.03, 1.0, 0.05)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "truncated"),
        ('{"slo": {"ttft": 1}}', "unknown field"),
        ('{"slo": {"ttft_s": -1}}', "above 0"),
        ('{"slo": {}, "profiled": {"limit_s": 0}}', "above 0"),
        ('{"slo": {}, "profiled": {"prompts_alone": "yes"}}', "bool"),
        ('{"slo": {}, "profiled": {"idle_s": 1}}', "unknown field"),
        ('{"slo": {}, "profiled": {"prompt_tokens": 0}}', "at least 1"),
    ],
)
def test_a_bad_slo_file_is_named(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "slo.json"
    path.write_text(text)
    with pytest.raises(SettingsError, match=problem) as error:
        read_slo_file(path)
    assert "BATCHWEAVE_SLO_FILE" in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "--offline FILE"),
        (("--policies", "none-such"), "choose from"),
        (("--slo", "ttft=fast"), "not a number"),
        (("--slo", "latency=1"), "no 'latency'"),
        (("--slo", "percentile=0.9"), "at least one of"),
        (("--slo", "ttft=-1"), "above 0"),
        (("--relative", "mean_tbt=-0.1"), "below 0"),
        (("--relative", "tbt=0.1"), "mean_tbt"),
        (("--load", "0"), "--load"),
        (("--policies", "ooco"), "give --pools strict:1,relaxed:1"),
        (("--pools", "strict:2"), "only one engine of each kind"),
        (("--plot", "x.png"), "--workload only"),
    ],
)
def test_bad_options_are_named(files: tuple[Path, Path], arguments: tuple[str, ...], problem: str) -> None:
    online, offline = files
    given = ("--online", online, "--offline", offline) if arguments else ("--online", online)
    found = compared(*given, *arguments)
    assert found.exit_code == 1
    assert problem in found.output.replace("\n", " ")


def test_a_load_over_a_long_time_is_refused(files: tuple[Path, Path], tmp_path: Path) -> None:
    """Two requests in six days would be repeated millions of times."""
    online = tmp_path / "seldom.jsonl"
    lines = [{"segments": [[k, 50]], "output_tokens": 5, "arrival_s": 500_000.0 * k} for k in range(2)]
    online.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = profile_slo("--online", online, "--offline", files[1], "--load", 0.3)
    assert found.exit_code == 1
    assert "are the most; give a part of" in found.output.replace("\n", " ")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ({"segments": [["a", 5]], "output_tokens": 5}, "has no arrival_s"),
        ({"segments": [["a", 5]], "output_tokens": 5, "arrival_s": 0}, "at once"),
        ({"segments": [["a", 5]], "output_tokens": 5, "arrival_s": 1e9}, "a week"),
        ({"segments": [["a", 5]], "output_tokens": 5, "arrival_s": -1}, "at least 0"),
        ({"segments": [["a", 5]], "output_tokens": 5, "class": "batch"}, "no requests of the class"),
        ({"segments": [["a", 5]], "output_tokens": 5, "class": "vip"}, "vip"),
    ],
)
def test_bad_online_files_are_named(
    files: tuple[Path, Path], tmp_path: Path, line: dict[str, Any], problem: str
) -> None:
    online = tmp_path / "online.jsonl"
    online.write_text(json.dumps(line) + "\n")
    found = profile_slo("--online", online, "--offline", files[1])
    assert found.exit_code == 1
    assert problem in found.output.replace("\n", " ")
    assert "online.jsonl" in found.output.replace("\n", "")
