"""`batchweave run`: one command, no service to start; it continues where it was interrupted."""

import json
import os
import re
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

RULES = {
    "rules": [
        {"prompt": "bad*", "status": 400},
        {"prompt": "slow*", "delay_s": 1},
        {"prompt": "late*", "delay_s": 20},  # still runs when a test has seen the first answers, however slow it is
        {"prompt": "*"},
    ]
}


def request(custom_id: str, text: str) -> dict[str, Any]:
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rules.json").write_text(json.dumps(RULES))
    return tmp_path


def command(folder: Path, *more: str) -> list[str]:
    scripted = ["--model", "demo", "--engine", "scripted", "--script", str(folder / "rules.json")]
    return [sys.executable, "-m", "batchweave", "run", *more, *scripted, "--data-dir", str(folder / "data")]


def run(folder: Path, *more: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run(
        command(folder, *more), capture_output=True, text=True, cwd=folder, timeout=300, env=environment
    )


def begun(folder: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(command(folder, *more), stderr=subprocess.PIPE, text=True, cwd=folder)


def started(folder: Path) -> Up:
    """Start a service that stays, on the data folder of the runs."""
    rules = str(folder / "rules.json")
    service = Up.on(folder / "data", "--engine", "scripted", "--script", rules, "--model-name", "m")
    service.start()
    return service


def write(folder: Path, *requests: dict[str, Any]) -> None:
    (folder / "in.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in requests))


def answers(path: Path) -> dict[str, str]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {each["custom_id"]: each["response"]["body"]["choices"][0]["message"]["content"] for each in lines}


def test_a_file_is_run_once_and_a_changed_one_from_nothing(folder: Path) -> None:
    write(folder, request("a", "hello"), request("b", "bad one"))
    first = run(folder, "-i", "in.jsonl", "-o", "out.jsonl")
    assert first.returncode == 3, first.stderr
    assert answers(folder / "out.jsonl") == {"a": "hello"}
    errors = [json.loads(line) for line in (folder / "out.errors.jsonl").read_text().splitlines()]
    assert [each["custom_id"] for each in errors] == ["b"]
    assert "runs as batch_" in first.stderr
    again = run(folder, "in.jsonl", "--output", "out.jsonl")
    assert "has been run already; --again runs it again" in again.stderr
    assert again.returncode == 3
    write(folder, request("a", "hello again"))
    changed = run(folder, "in.jsonl")
    assert changed.returncode == 0, changed.stderr
    assert answers(folder / "in.results.jsonl") == {"a": "hello again"}
    afresh = run(folder, "in.jsonl", "--again")
    assert "runs as batch_" in afresh.stderr
    assert not [each for each in folder.iterdir() if each.suffix == ".part"]


def test_it_joins_a_service_that_runs_on_the_folder_and_leaves_it_there(folder: Path) -> None:
    service = started(folder)
    write(folder, request("a", "hello"))
    found = run(folder, "in.jsonl")
    assert found.returncode == 0, found.stderr
    assert f"joins the service on {folder / 'data'}, with its model, engines and GPUs: {service.url}" in found.stderr
    assert answers(folder / "in.results.jsonl") == {"a": "hello"}
    assert service.stop() == 0


@pytest.mark.slow
def test_other_rules_and_deleted_results_start_from_nothing(folder: Path) -> None:
    service = started(folder)
    write(folder, request("a", "hello"))
    assert run(folder, "in.jsonl").returncode == 0
    (file_id,) = [each.id for each in service.client.files.list() if each.purpose == "batch_output"]
    service.client.files.delete(file_id)
    afresh = run(folder, "in.jsonl")
    assert (afresh.returncode, "runs as batch_" in afresh.stderr) == (0, True), afresh.stderr
    (folder / "rules.json").write_text('{"rules": [{"prompt": "*", "answer": "new"}]}')
    other = run(folder, "in.jsonl")
    assert (other.returncode, "runs as batch_" in other.stderr) == (0, True), other.stderr
    (folder / "data" / "x.jsonl").write_text(json.dumps({**request("a", "b"), "body": {"model": "other"}}))
    wrong = run(folder, "data/x.jsonl")
    assert wrong.returncode == 1
    assert "serves m, and not other. Stop it, or use another --data-dir" in wrong.stderr
    assert service.stop() == 0


@pytest.mark.slow
def test_runs_beside_each_other_keep_apart_or_share_one_service(tmp_path: Path) -> None:
    """Three at once: two on one data folder, of which one starts the service and ends first, and one on another."""
    places = [tmp_path / name for name in ("one", "two")]
    for place in places:
        place.mkdir()
        rules = [{"prompt": "slow*", "answer": place.name, "delay_s": 6}, {"prompt": "*", "answer": place.name}]
        (place / "rules.json").write_text(json.dumps({"rules": rules}))
        write(place, request("a", "hello"))
    (places[0] / "slow.jsonl").write_text(json.dumps(request("b", "slow")))
    runs = [begun(places[0], "in.jsonl"), begun(places[1], "in.jsonl"), begun(places[0], "slow.jsonl")]
    said = [each.communicate(timeout=300)[1] for each in runs]
    assert [each.returncode for each in runs] == [0, 0, 0], said
    assert answers(places[0] / "in.results.jsonl") == {"a": "one"}
    assert answers(places[1] / "in.results.jsonl") == {"a": "two"}
    assert answers(places[0] / "slow.results.jsonl") == {"b": "one"}
    assert sum("joins the service" in each for each in said) >= 1


@pytest.mark.slow
def test_a_joined_service_that_is_killed_is_replaced(folder: Path) -> None:
    service = started(folder)
    write(folder, *(request(str(number), "quick" if number < 250 else "late") for number in range(300)))
    process = begun(folder, "in.jsonl")
    service.until(lambda: any(service.done(each.id) for each in service.client.batches.list()), "answers")
    assert service.stop(signal.SIGKILL) == -signal.SIGKILL
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert "the service that was joined has ended; continues with one of its own" in said
    assert "in.jsonl continues: batch_" in said
    assert len(answers(folder / "in.results.jsonl")) == 300


@pytest.mark.slow
def test_one_run_at_a_time_writes_an_output(folder: Path) -> None:
    service = started(folder)
    write(folder, *(request(str(number), "slow") for number in range(100)))
    first = begun(folder, "in.jsonl")
    service.until(lambda: bool(service.client.batches.list().data), "the batch of the first one")
    first.send_signal(signal.SIGSTOP)  # or it may end before the second one has begun
    try:
        second = run(folder, "in.jsonl")
    finally:
        first.send_signal(signal.SIGCONT)
    assert second.returncode == 1
    assert "in.results.jsonl.part is being written by another run of this command" in second.stderr
    assert first.wait(300) == 0
    assert len(answers(folder / "in.results.jsonl")) == 100
    assert service.stop() == 0


def test_what_the_environment_says_for_others_does_no_harm(folder: Path) -> None:
    write(folder, request("a", "hello"))
    others = {"BATCHWEAVE_AUTH": "keys", "BATCHWEAVE_HOST": "0.0.0.0", "BATCHWEAVE_URL": "http://127.0.0.1:1"}
    found = run(folder, "in.jsonl", HTTP_PROXY="http://127.0.0.1:1", http_proxy="http://127.0.0.1:1", **others)
    assert found.returncode == 0, found.stderr


@pytest.mark.slow
def test_after_ctrl_c_it_continues_and_results_come_while_it_runs(folder: Path) -> None:
    write(folder, *(request(str(number), "quick" if number < 50 else "slow") for number in range(300)))
    process = begun(folder, "in.jsonl")
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
    # What the service had in hand may have been all that was left.
    assert re.search(r"in\.jsonl (continues|has been run already; --again runs it again): batch_", again.stderr)
    assert len(answers(folder / "in.results.jsonl")) == 300


def test_what_is_wrong_is_said_in_one_line(folder: Path) -> None:
    (folder / "empty.jsonl").write_text("")
    (folder / "text.jsonl").write_text("hello\n")
    write(folder, request("a", "b"))
    (folder / "in.results.jsonl").mkdir()
    (folder / "x.errors.jsonl").write_text(json.dumps(request("a", "b")))
    for arguments, message in (
        (["missing.jsonl"], "missing.jsonl: No such file or directory"),
        (["empty.jsonl"], "empty.jsonl is empty"),
        (["text.jsonl"], 'its first line is not a request with a "url"'),
        ([], "name one file"),
        (["in.jsonl"], "in.results.jsonl is not a regular file; choose a file to write"),
        (["in.jsonl", "-o", "in.jsonl"], "the results would replace in.jsonl; choose another --output"),
        (["x.errors.jsonl", "-o", "x.jsonl"], "the results would replace x.errors.jsonl"),
        (["/dev/null"], "/dev/null is not a regular file"),
        (
            ["in.jsonl", "-o", "o.jsonl", "--engines", "0"],
            "the service did not start: --engines 0: give a number from 1 to 64.",
        ),
    ):
        found = run(folder, *arguments)
        assert found.returncode == 1, found.stderr
        assert message in found.stderr
        assert "Traceback" not in found.stderr


@pytest.mark.slow
def test_killed_again_and_again_it_loses_and_repeats_nothing(tmp_path: Path) -> None:
    killed, _ = run_killed(tmp_path, 1500, 6, seed=os.getpid())
    assert killed
