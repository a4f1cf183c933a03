"""The remote commands as a user types them, against the real API and jobs with a scripted engine."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import delete, update

from batchweave.errors import CommandError
from batchweave.remote import submit as submits
from service.db.tables import BatchStatus, Model
from service.queue.progress import Heartbeat
from service.settings import Settings
from tests.conftest import Clock
from tests.integration.command import run, start, write
from tests.integration.harness import Harness, ScriptedEngine, jsonl, line
from tests.integration.serving import serve
from tests.waiting import until


@pytest.fixture
def database_url(sqlite_url: str) -> str:
    """One database is enough: the commands see the API alone."""
    return sqlite_url


async def bad_batch(harness: Harness) -> str:
    """One whose file has errors."""
    batch_id = await harness.submit(b"[]\n")
    await harness.plan()
    return batch_id


async def knows_that_it_is_drained(harness: Harness) -> bool:
    return (await Heartbeat(harness.redis).alive())[0].get("drained", False)


async def run_beside_the_jobs(
    harness: Harness, engine: ScriptedEngine, url: str, *arguments: object
) -> tuple[int, str, str]:
    async with harness.working(engine):
        command = asyncio.create_task(run(url, *arguments))
        while not command.done():
            await harness.plan()
            await harness.finalizer.run_once()
            await asyncio.sleep(0.02)
        return await command


async def test_submit_waits_and_writes_results_and_errors(harness: Harness, url: str, tmp_path: Path) -> None:
    engine = ScriptedEngine(statuses={"request 3": [400]})
    path, output = write(tmp_path, [line(n) for n in range(20)]), tmp_path / "out.jsonl"
    code, printed, said = await run_beside_the_jobs(harness, engine, url, "submit", path, "-o", output, "--json")
    batch = json.loads(printed)
    assert (code, batch["status"], batch["request_counts"]["failed"]) == (3, "completed", 1)
    assert {json.loads(each)["custom_id"] for each in output.open()} == {f"id-{n}" for n in range(20) if n != 3}
    [error] = (tmp_path / "out.errors.jsonl").read_text().splitlines()
    assert json.loads(error)["custom_id"] == "id-3"
    assert "1 failed: The script answers this request with 400. (for example id-3)" in said
    assert "tokens: 190 in" in said


async def test_all_is_well_is_zero_and_a_bad_file_four(harness: Harness, url: str, tmp_path: Path) -> None:
    path = write(tmp_path, [line(n) for n in range(4)])
    code, printed, _ = await run_beside_the_jobs(harness, ScriptedEngine(), url, "submit", path, "--wait")
    assert code == 0
    assert printed.startswith("batch_")
    path = write(tmp_path, [line(1), line(1)])
    code, _, said = await run_beside_the_jobs(harness, ScriptedEngine(), url, "submit", path, "--wait")
    assert code == 4
    assert "line 2" in said
    assert "its file has 1 error, and nothing ran. Correct the file and submit it again" in said


async def test_faults_of_a_file_are_said_though_nobody_waits(harness: Harness, url: str, tmp_path: Path) -> None:
    path = write(tmp_path, [line(n, body={**line(n)["body"], "model": "another"}) for n in range(2)])
    code, printed, said = await run_beside_the_jobs(harness, ScriptedEngine(), url, "submit", path)
    assert (code, printed.startswith("batch_")) == (4, True)
    assert "line 1: The model 'another' does not exist here" in said
    path = write(tmp_path, [line(n, body={**line(n)["body"], "maxtokens": 5}) for n in range(2)])
    code, printed, said = await run_beside_the_jobs(harness, ScriptedEngine(), url, "submit", path, "--json")
    assert (code, said.count("no engine knows the parameter 'maxtokens'")) == (0, 1)
    assert json.loads(printed)["status"] != "validating"


async def test_what_takes_long_to_check_is_not_waited_for(url: str, tmp_path: Path) -> None:
    code, printed, _ = await run(url, "submit", write(tmp_path, [line(1)]), "--json")
    assert (code, json.loads(printed)["status"]) == (0, "validating")


async def test_a_misspelt_parameter_is_named_once(harness: Harness, url: str, tmp_path: Path) -> None:
    right = line(1)["body"]
    lines = [line(n, body={**right, "maxtokens": 5} if n < 3 else right) for n in range(5)]
    engine = ScriptedEngine()
    code, printed, said = await run_beside_the_jobs(harness, engine, url, "submit", write(tmp_path, lines), "--wait")
    warning = "warning: no engine knows the parameter 'maxtokens' of 3 lines, so it is ignored. Is 'max_tokens' meant?"
    assert (code, said.count(warning)) == (0, 1)
    assert warning in (await run(url, "batches", "show", printed.strip()))[2]
    about = json.loads((await run(url, "batches", "show", printed.strip(), "--json"))[1])["batchweave"]
    assert about["unknown_parameters"] == [{"name": "maxtokens", "lines": 3, "similar": "max_tokens", "why": None}]


async def test_tools_are_told_where_no_worker_finds_calls(harness: Harness, url: str, tmp_path: Path) -> None:
    async with harness.database.write() as session:
        await session.execute(update(Model).values(tool_parser=""))
    tools = [{"type": "function", "function": {"name": "get_weather"}}]
    path = write(tmp_path, [line(n, body={**line(n)["body"], "tools": tools}) for n in range(3)])
    code, _, said = await run_beside_the_jobs(harness, ScriptedEngine(), url, "submit", path, "--wait")
    assert (code, said.count("warning: 'tools' of 3 lines does not do what it says: the model's worker")) == (0, 1)


async def test_files_of_an_earlier_run_are_named(harness: Harness, url: str, tmp_path: Path) -> None:
    """They stay, because nobody asked to delete them, and a script must not take them for this run's."""
    output, errors = tmp_path / "out.jsonl", tmp_path / "out.errors.jsonl"
    output.write_text("old\n")
    errors.write_text("old\n")
    bad = write(tmp_path, [line(1), line(1)])
    _, _, said = await run_beside_the_jobs(harness, ScriptedEngine(), url, "submit", bad, "-o", output)
    for path in (output, errors):
        assert f"{path} is from an earlier run" in said.replace("\n", "")
    good = write(tmp_path, [line(n) for n in range(4)])
    _, _, said = await run_beside_the_jobs(harness, ScriptedEngine(), url, "submit", good, "-o", output)
    assert f"{errors} is from an earlier run" in said.replace("\n", "")
    assert (output.read_text() != "old\n", errors.read_text()) == (True, "old\n")


async def test_an_uploaded_file_is_submitted_by_its_id(harness: Harness, url: str, tmp_path: Path) -> None:
    code, printed, _ = await run(url, "files", "upload", write(tmp_path, [line(n) for n in range(4)]))
    file_id = printed.strip()
    again = ("submit", file_id, "--wait", "--long-lines-fail-file")
    for _ in range(2):
        code, printed, _ = await run_beside_the_jobs(harness, ScriptedEngine(), url, *again)
        batch = await harness.batch(printed.strip())
        assert (code, batch.input_file_id, batch.on_long_line) == (0, file_id, "fail_file")
    code, _, said = await run(url, "submit", "file-gone")
    assert (code, "`batchweave files list` lists yours" in said.replace("\n", " ")) == (1, True)


async def test_ctrl_c_ends_the_command_and_not_the_batch(harness: Harness, url: str, tmp_path: Path) -> None:
    command = start(url, "submit", write(tmp_path, [line(1)]), "--wait")
    assert command.stderr is not None
    batch_id = (await asyncio.to_thread(command.stderr.readline)).split()[-1]
    await asyncio.to_thread(command.stderr.readline)  # of its progress
    command.send_signal(signal.SIGINT)
    _, said = await asyncio.to_thread(command.communicate, None, 60)
    assert command.returncode == 130
    assert f"batchweave batches wait {batch_id}" in said
    assert "Traceback" not in said
    assert (await harness.batch(batch_id)).status == BatchStatus.VALIDATING


async def test_a_plan_is_shown_before_the_batch_is_started(harness: Harness, url: str, tmp_path: Path) -> None:
    path = write(tmp_path, [line(n) for n in range(4)])
    code, printed, said = await run_beside_the_jobs(harness, ScriptedEngine(), url, "submit", path, "--preview")
    batch_id = printed.strip()
    assert (code, f"batchweave batches start {batch_id}" in said) == (0, True)
    assert "expected engine time" in said
    assert "of them shared" in said
    assert (await harness.batch(batch_id)).held
    code, printed, _ = await run_beside_the_jobs(harness, ScriptedEngine(), url, "batches", "start", batch_id, "--wait")
    assert (code, printed.strip()) == (0, batch_id)
    assert (await harness.batch(batch_id)).status == BatchStatus.COMPLETED


async def test_a_preview_of_a_bad_file_says_what_is_wrong(harness: Harness, url: str, tmp_path: Path) -> None:
    path = write(tmp_path, [line(1), line(1)])
    code, _, said = await run_beside_the_jobs(harness, ScriptedEngine(), url, "submit", path, "--preview")
    assert (code, "line 2" in said) == (4, True)


async def test_nobody_can_be_asked_without_a_terminal(url: str, tmp_path: Path) -> None:
    code, printed, said = await run(url, "submit", write(tmp_path, [line(1)]), "--preview", "--wait")
    assert (code, printed, "without a terminal" in said) == (1, "", True)


def test_a_service_that_cannot_hold_a_batch_is_told_to_stop_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    batch = {"id": "batch_1", "created_at": 0, "endpoint": "/v1/x", "input_file_id": "file-1", "status": "in_progress"}

    def post(path: str, body: Any = None) -> dict[str, Any]:
        calls.append(path)
        return batch

    monkeypatch.setattr(submits, "service_at", lambda url, key: nullcontext(SimpleNamespace(post=post)))
    monkeypatch.setattr(submits, "upload", lambda client, file: SimpleNamespace(id="file-1", bytes=1))
    with pytest.raises(CommandError, match="cannot hold a batch"):
        submits.submit(write(tmp_path, [line(1)]), show_plan=True, window="24h", url="", key="")
    assert calls == ["/batches", "/batches/batch_1/cancel"]


@pytest.mark.parametrize("name", ["x" * 230, "x" * 300, "loop/out.jsonl"])
async def test_a_path_that_no_file_can_have_is_refused_at_once(url: str, tmp_path: Path, name: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    code, _, said = await run(url, "submit", write(tmp_path, [line(1)]), "--output", tmp_path / name)
    assert (code, "choose another" in said) == (1, True)


@pytest.mark.parametrize(("answer", "status"), [(b"y\n", "completed"), (b"n\n", "in_progress")])
async def test_whoever_sits_at_the_terminal_is_asked(
    harness: Harness, url: str, tmp_path: Path, answer: bytes, status: str
) -> None:
    keyboard, terminal = os.openpty()
    os.write(keyboard, answer)
    path, output = write(tmp_path, [line(n) for n in range(4)]), tmp_path / "out.jsonl"
    arguments = ("submit", path, "--preview", "--output", output, "--url", url)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "batchweave",
        *map(str, arguments),
        stdin=terminal,
        stderr=terminal,
        stdout=subprocess.PIPE,
    )
    reader = asyncio.create_task(process.communicate())
    async with harness.working(ScriptedEngine()):
        os.set_blocking(keyboard, False)

        async def has_ended() -> bool:
            await harness.plan()
            await harness.finalizer.run_once()
            with suppress(BlockingIOError):
                os.read(keyboard, 65536)  # a terminal that nobody reads holds the command up
            return reader.done()

        await until(has_ended)
    assert process.returncode == 0
    batch_id = reader.result()[0].decode().strip()
    assert (await harness.batch(batch_id)).status == status
    assert output.exists() == (status == "completed")
    os.close(terminal)
    os.close(keyboard)


@pytest.mark.slow
async def test_a_batch_is_listed_shown_cancelled_and_retried(harness: Harness, url: str, tmp_path: Path) -> None:
    path = write(tmp_path, [line(n) for n in range(4)])
    batch_id = (await run(url, "submit", path, "--metadata", "run=12", "--metadata", "name=Labels"))[1].strip()
    await harness.plan()
    code, printed, _ = await run(url, "batches", "list", "--status", "in_progress")
    assert code == 0
    assert batch_id in printed
    assert "0 of 4" in printed
    assert printed.splitlines()[1].endswith("  Labels")
    assert (await run(url, "batches", "list", "--status", "failed", "--json"))[1] == "[]\n"
    assert (await run(url, "batches", "list", "--status", "bogus"))[0] == 2
    assert "run=12" in (await run(url, "batches", "show", batch_id))[1]
    assert "is being cancelled" in (await run(url, "batches", "cancel", batch_id))[2]
    await harness.until_ended(batch_id)
    assert (await run(url, "batches", "wait", batch_id))[0] == 4
    shown = (await run(url, "batches", "show", batch_id))[1]
    assert ("0 of 4" in shown, "4 not run" in shown, "output file" in shown) == (True, True, False)
    code, printed, said = await run_beside_the_jobs(
        harness, ScriptedEngine(), url, "batches", "retry", batch_id, "--wait"
    )
    assert (code, "4 of 4 answered" in said) == (0, True)
    code, printed, _ = await run(url, "batches", "results", printed.strip())
    assert {json.loads(each)["custom_id"] for each in printed.splitlines()} == {f"id-{n}" for n in range(4)}
    code, _, said = await run(url, "batches", "results", batch_id, "--json")
    assert (code, "it needs --output" in said) == (1, True)
    output = tmp_path / "out.jsonl"
    told = json.loads((await run(url, "batches", "results", batch_id, "--json", "--output", output))[1])
    assert told == {"id": batch_id, "status": "cancelled", "errors": str(tmp_path / "out.errors.jsonl")}
    assert Path(told["errors"]).read_bytes().count(b"\n") == 4
    assert f"{batch_id} is deleted" in (await run(url, "batches", "delete", batch_id))[2]
    assert (await run(url, "batches", "show", batch_id))[0] == 1


async def test_waiting_survives_a_service_that_restarts(harness: Harness, settings: Settings, clock: Clock) -> None:
    batch_id = await harness.submit(jsonl(line(n) for n in range(4)))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with serve(settings, clock, port):
        command = start(url, "batches", "wait", batch_id)
        assert command.stderr is not None
        assert "waiting for validation" in await asyncio.to_thread(command.stderr.readline)
    assert "is not responding" in await asyncio.to_thread(command.stderr.readline)
    await asyncio.sleep(3)  # in which it looks again and again
    await harness.plan()
    async with harness.working(ScriptedEngine()):
        await harness.until_ended(batch_id)
    with serve(settings, clock, port):
        _, said = await asyncio.to_thread(command.communicate, None, 60)
    assert (command.returncode, "4 of 4 answered" in said) == (0, True)
    assert "waiting for validation" not in said  # it says that the service is away once


async def test_models_are_listed_by_name(harness: Harness, url: str) -> None:
    code, found, _ = await run(url, "models")
    assert (code, "test-model" in found) == (0, True)
    assert json.loads((await run(url, "models", "--json"))[1])[0]["id"] == "test-model"
    async with harness.database.write() as session:
        await session.execute(delete(Model))
    code, _, said = await run(url, "models")
    assert (code, "No model is known yet" in said) == (0, True)


@pytest.mark.parametrize(("option", "code"), [(("--window", "5x"), 2), (("--endpoint", "/v1/foo"), 1)])
async def test_what_cannot_be_a_batch_leaves_no_file(
    url: str, tmp_path: Path, option: tuple[str, str], code: int
) -> None:
    found, _, said = await run(url, "submit", write(tmp_path, [line(1)]), *option)
    assert (found, "pattern" in said) == (code, False)
    assert (await run(url, "files", "list", "--json"))[1] == "[]\n"


async def test_results_can_be_piped_into_what_reads_a_part_of_them(harness: Harness, url: str, tmp_path: Path) -> None:
    body = {"model": "test-model", "messages": [{"role": "user", "content": "x" * 4000}]}
    batch_id = await harness.submit(jsonl(line(n, body=body) for n in range(200)))
    await harness.plan()
    async with harness.working(ScriptedEngine()):
        await harness.until_ended(batch_id)
    code, _, said = await run(url, "batches", "results", await bad_batch(harness))
    assert (code, "nothing ran" in said) == (1, True)
    command = start(url, "batches", "results", batch_id)
    assert command.stdout is not None
    first = await asyncio.to_thread(command.stdout.readline)
    assert "custom_id" in first
    command.stdout.close()
    assert await asyncio.to_thread(command.wait, 30) == 141
    assert command.stderr is not None
    assert command.stderr.read() == ""


@pytest.mark.slow
async def test_a_drained_worker_takes_nothing_until_it_is_resumed(harness: Harness, url: str) -> None:
    engine = ScriptedEngine()
    async with harness.working(engine, "worker-a"):
        await until(Heartbeat(harness.redis).alive)
        assert (await run(url, "workers", "drain", "worker-a"))[0] == 0  # from now on, whether it knows it or not
        batch_id = await harness.submit(jsonl(line(n) for n in range(4)))
        await harness.plan()
        await asyncio.sleep(1.0)  # an undrained worker has taken it in a hundredth of that
        assert not engine.runs
        await until(lambda: knows_that_it_is_drained(harness))
        [found] = json.loads((await run(url, "workers", "list", "--json"))[1])
        assert (found["id"], found["state"], found["slices"]) == ("worker-a", "draining", 0)
        assert (await run(url, "workers", "resume", "worker-a"))[0] == 0
        await harness.until_ended(batch_id)
    code, _, said = await run(url, "workers", "drain", "worker-z")
    assert (code, "worker-z" in said) == (1, True)
