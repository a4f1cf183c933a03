"""Commands that cannot do what they are told say why in one line and exit 1."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from batchweave.table import COMMANDS, command_line


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "batchweave", *arguments]
    env = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)


def call(*arguments: str, **environment: str) -> Result:
    """The same within this process, where a process for each call would take longest."""
    return CliRunner().invoke(command_line(arguments[0]), arguments, env=environment)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"BATCHWEAVE_PORT": "eighty"}, "BATCHWEAVE_PORT"),
        ({"BATCHWEAVE_ENGINE_ARGS": "{bad"}, "BATCHWEAVE_ENGINE_ARGS is not valid JSON"),
        ({"BATCHWEAVE_DATABASE_URL": "zorg://x"}, "zorg"),
        ({"BATCHWEAVE_REDIS_URL": "zorg://x"}, "BATCHWEAVE_REDIS_URL"),
        ({"BATCHWEAVE_STORAGE_URL": "zorg://x"}, "BATCHWEAVE_STORAGE_URL"),
        ({"BATCHWEAVE_DATA_DIR": "/dev/null/below"}, "/dev/null"),
    ],
)
def test_wrong_setting_stops_the_start(tmp_path: Path, environment: dict[str, str], said: str) -> None:
    found = run("up", **{"BATCHWEAVE_DATA_DIR": str(tmp_path / "data"), "BATCHWEAVE_PORT": "0", **environment})
    assert found.returncode == 1
    assert said in found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize("role", ["api", "planner"])
@pytest.mark.parametrize(
    "url", ["sqlite:////dev/null/below/x.db", "postgresql://u:secret@127.0.0.1:1/x"]
)  # nobody listens there
def test_role_without_a_database_says_so(tmp_path: Path, role: str, url: str) -> None:
    found = run(role, BATCHWEAVE_DATA_DIR=str(tmp_path / "data"), BATCHWEAVE_DATABASE_URL=url)
    assert found.returncode == 1
    assert "The database cannot be opened" in found.stderr
    assert "Traceback" not in found.stderr
    assert "secret" not in found.stderr + found.stdout


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        (b"", "is empty"),
        (b"\xff\xfe", "first line is not a request"),
        (b"[1]\n", "first line is not a request"),
        (b'{"url": "/v1/moderations", "body": {"model": "m"}}', "/v1/moderations"),
    ],
)
def test_demo_of_a_wrong_file_says_what_it_needs(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "in.jsonl"
    if content is not None:
        path.write_bytes(content)
    found = run("demo", "--file", str(path), "--data-dir", str(tmp_path / "data"))
    assert found.returncode == 1
    assert said in found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_the_help_that_the_list_says(name: str) -> None:
    found = CliRunner().invoke(command_line(name), [name, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert found.exit_code == 0
    assert COMMANDS[name][1].split(".")[0] in " ".join(found.stdout.split())


def test_the_list_imports_no_command() -> None:
    code = "import sys; from batchweave.table import command_line; command_line(''); print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"sqlalchemy", "numba", "openai", "fastapi"} & set(found.stdout.split())


def test_keys_are_made_listed_and_revoked(tmp_path: Path) -> None:
    here = {"BATCHWEAVE_DATA_DIR": str(tmp_path / "data")}
    first = call("projects", "create", "evaluation", **here)
    assert (first.exit_code, "A new database" in first.stderr) == (0, True)
    assert "A new database" not in call("projects", "list", **here).stderr
    made = call("keys", "create", "--name", "ana", "--project", "evaluation", "--days", "3", "--tier", "flex", **here)
    assert (made.exit_code, made.stdout[:3]) == (0, "bw-")
    listed = call("keys", "list", **here).stdout
    assert "ana" in listed
    assert made.stdout.strip() not in listed
    assert "flex" in listed
    key_id = next(word for word in listed.split() if word.startswith("key_"))
    assert call("keys", "revoke", key_id, **here).exit_code == 0
    again = call("keys", "revoke", key_id, **here)
    assert (again.exit_code, "Traceback" in again.stderr) == (1, False)
    assert "2,000" in call("projects", "set", "evaluation", "--max-batches", "2000", **here).stdout
    where = ("--data-dir", here["BATCHWEAVE_DATA_DIR"])
    there = call("projects", "set", "evaluation", "--max-batches", "-1", *where, BATCHWEAVE_DATA_DIR=str(tmp_path))
    assert ("evaluation" in there.stdout, "2,000" in there.stdout) == (True, False)
    said = call("audit", "--project", "evaluation", **here).stdout.split()
    assert [word for word in said if word in ("project.create", "key.create", "key.revoke", "project.set")] == [
        "project.create",
        "key.create",
        "key.revoke",
        "project.set",
        "project.set",
    ]
    details = [each["detail"] for each in json.loads(call("audit", "--json", **here).stdout)]
    assert details[:2] == ["evaluation", "ana: user, 3 days, tier flex"]
    assert details[-2:] == ["max_batches 2000", "max_batches none"]
    assert "priority" in call("projects", "set", "evaluation", "--tier", "priority", **here).stdout
    assert call("projects", "set", "evaluation", "--tier", "best", **here).exit_code == 2
    unreadable = call("keys", "create", "--name", "\udcff", **here)
    assert (unreadable.exit_code, "is not a valid name" in unreadable.stderr) == (1, True)
    unknown = call("keys", "create", "--name", "x", "--project", "nobody", **here)
    assert (unknown.exit_code, "there is no project 'nobody'" in unknown.stderr) == (1, True)


def test_ctrl_c_during_imports_ends_with_one_line() -> None:
    code = """
import builtins, os, signal
from batchweave.__main__ import main

real = builtins.__import__

def interrupted(name, *arguments, **more):
    if name == "batchweave.table":
        os.kill(os.getpid(), signal.SIGINT)
    return real(name, *arguments, **more)

builtins.__import__ = interrupted
main()
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stdout, found.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize("command", ["submit", "batches", "files", "workers"])
def test_remote_commands_import_little(command: str) -> None:
    """What makes them slow to start: the official client, pydantic's models, the service's own parts."""
    code = f"from batchweave.table import command_line; command_line({command!r}); import sys; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(found.stdout.split())
    assert not loaded & {"openai", "fastapi", "sqlalchemy", "redis", "numpy", "service.settings", "service.db"}
