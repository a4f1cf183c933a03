"""`batchweave run`: one command, no service to start; it continues where it was interrupted."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from service.demo.prompts import CHAT
from tests.acceptance.run_killed import run_killed
from tests.acceptance.service import Up

RULES = {"rules": [{"prompt": "bad*", "status": 400}, {"prompt": "slow*", "delay_s": 3}, {"prompt": "*"}]}


def request(custom_id: str, text: str) -> dict[str, Any]:
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rules.json").write_text(json.dumps(RULES))
    return tmp_path


def command(folder: Path, *more: str) -> list[str]:
    scripted = ["--model", "demo", "--engine", "scripted", "--script", str(folder / "rules.json")]
    return [sys.executable, "-m", "service.cli", "run", *more, *scripted, "--data-dir", str(folder / "data")]


def run(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(folder, *more), capture_output=True, text=True, cwd=folder, timeout=300)


def write(folder: Path, *requests: dict[str, Any]) -> None:
    (folder / "in.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in requests))


def answers(path: Path) -> dict[str, str]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {each["custom_id"]: each["response"]["body"]["choices"][0]["message"]["content"] for each in lines}


def test_a_file_is_run_once_and_a_changed_one_anew(folder: Path) -> None:
    write(folder, request("a", "hello"), request("b", "bad one"))
    first = run(folder, "-i", "in.jsonl", "-o", "out.jsonl")
    assert first.returncode == 3, first.stderr
    assert answers(folder / "out.jsonl") == {"a": "hello"}
    errors = [json.loads(line) for line in (folder / "out.errors.jsonl").read_text().splitlines()]
    assert [each["custom_id"] for each in errors] == ["b"]
    assert "runs as batch_" in first.stderr
    again = run(folder, "in.jsonl", "--output", "out.jsonl")
    assert "has been run already; --again runs it anew" in again.stderr
    assert again.returncode == 3
    write(folder, request("a", "hello again"))
    changed = run(folder, "in.jsonl")
    assert changed.returncode == 0, changed.stderr
    assert answers(folder / "in.results.jsonl") == {"a": "hello again"}
    anew = run(folder, "in.jsonl", "--again")
    assert "runs as batch_" in anew.stderr
    assert not [each for each in folder.iterdir() if each.suffix == ".part"]


def test_it_joins_a_service_that_runs_on_the_folder_and_leaves_it_there(folder: Path) -> None:
    service = Up.on(
        folder / "data", "--engine", "scripted", "--script", str(folder / "rules.json"), "--model-name", "m"
    )
    service.start()
    write(folder, request("a", "hello"))
    found = run(folder, "in.jsonl")
    assert found.returncode == 0, found.stderr
    assert f"joins the service on {folder / 'data'}: {service.url}" in found.stderr
    assert answers(folder / "in.results.jsonl") == {"a": "hello"}
    assert service.stop() == 0


def test_after_ctrl_c_it_continues_and_results_come_while_it_runs(folder: Path) -> None:
    write(folder, *(request(str(number), "quick" if number < 50 else "slow") for number in range(400)))
    process = subprocess.Popen(command(folder, "in.jsonl"), stderr=subprocess.PIPE, text=True, cwd=folder)
    part = folder / "in.results.jsonl.part"
    deadline = time.monotonic() + 200
    while not (part.exists() and part.read_bytes().count(b"\n")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=100)
    assert process.returncode == 130, said
    assert "Stopped. Run the same command again to continue." in said
    assert not (folder / "in.results.jsonl").exists()
    again = run(folder, "in.jsonl")
    assert again.returncode == 0, again.stderr
    assert "in.jsonl continues: batch_" in again.stderr
    assert len(answers(folder / "in.results.jsonl")) == 400


def test_what_is_wrong_is_said_in_one_line(folder: Path) -> None:
    (folder / "empty.jsonl").write_text("")
    (folder / "text.jsonl").write_text("hello\n")
    write(folder, request("a", "b"))
    for arguments, message in (
        (["missing.jsonl"], "missing.jsonl: No such file or directory"),
        (["empty.jsonl"], "empty.jsonl is empty"),
        (["text.jsonl"], 'its first line is not a request with a "url"'),
        ([], "name one file"),
        (["in.jsonl", "--engines", "0"], "the service did not start: --engines 0: give a number from 1 to 64."),
    ):
        found = run(folder, *arguments)
        assert found.returncode == 1, found.stderr
        assert message in found.stderr
        assert "Traceback" not in found.stderr


@pytest.mark.slow
def test_killed_again_and_again_it_loses_and_repeats_nothing(tmp_path: Path) -> None:
    killed, _ = run_killed(tmp_path, 1500, 6, seed=os.getpid())
    assert killed
