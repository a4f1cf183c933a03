"""docker/ cannot be built by the tests; what can be checked without an engine is."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from batchweave.table import COMMANDS
from service.settings import Settings

DOCKER = Path(__file__).parents[2] / "docker"


def compose() -> Any:
    return yaml.safe_load((DOCKER / "compose.yaml").read_text())


def test_compose_sets_only_settings_that_exist() -> None:
    for service in compose()["services"].values():
        for name in service.get("environment", {}):
            if name.startswith("BATCHWEAVE_"):
                assert name.removeprefix("BATCHWEAVE_").lower() in Settings.model_fields


def test_compose_runs_commands_that_exist() -> None:
    for name in ("api", "planner", "worker"):
        assert compose()["services"][name].get("command", ["worker"])[0] in COMMANDS


def test_compose_has_a_worker_for_each_gpu() -> None:
    found = compose()["services"]
    workers = [each for name, each in found.items() if name.startswith("worker")]
    devices = [each["deploy"]["resources"]["reservations"]["devices"][0] for each in workers]
    assert [each["device_ids"] for each in devices] == [[str(number)] for number in range(8)]
    for profile, count in (("2gpus", 2), ("4gpus", 4), ("8gpus", 8)):
        assert [profile in each.get("profiles", [profile]) for each in workers] == [n < count for n in range(8)]
    assert all(each["command"] == ["worker"] for each in workers)


def test_dockerfiles_copy_what_exists() -> None:
    for file in DOCKER.glob("*.Dockerfile"):
        for line in file.read_text().splitlines():
            if line.startswith("COPY requirements"):
                for chosen in ("engine", "fleet"):
                    assert (DOCKER.parent / line.split()[1].replace("$REQUIREMENTS", chosen)).exists(), line


@pytest.mark.skipif(
    shutil.which("docker") is None
    or subprocess.run(["docker", "compose", "version"], capture_output=True).returncode != 0,
    reason="docker compose is not installed",
)
def test_compose_file_is_accepted_by_docker() -> None:
    command = ["docker", "compose", "-f", str(DOCKER / "compose.yaml"), "config", "--quiet"]
    environment = {"POSTGRES_PASSWORD": "x", "MODEL": "m", "PATH": "/usr/bin:/bin:/usr/local/bin"}
    assert subprocess.run(command, env=environment, capture_output=True).returncode == 0


STAND_IN = """#!/bin/sh
echo "$@" >> "$LOG"
case "$*" in *"$FAILS"*) exit 1;; esac
"""


@pytest.fixture
def release(tmp_path: Path) -> Any:
    """Runs docker/release in a repository of its own, with a docker that notes what it is told and fails when told."""
    repository, tools = tmp_path / "repository", tmp_path / "tools"
    shutil.copytree(DOCKER, repository / "docker")
    shutil.copy(DOCKER.parent / "pyproject.toml", repository)
    tools.mkdir()
    (tools / "docker").write_text(STAND_IN)
    (tools / "docker").chmod(0o755)
    author = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for words in (("init", "-q"), ("add", "."), (*author, "commit", "-qm", "all")):
        subprocess.run(["git", *words], cwd=repository, check=True)

    def run(*arguments: str, fails: str = "nothing") -> tuple[int, list[str], Path]:
        log = tmp_path / "log"
        log.unlink(missing_ok=True)
        environment = {"PATH": f"{tools}:{os.environ['PATH']}", "LOG": str(log), "FAILS": fails}
        found = subprocess.run(["docker/release", *arguments], cwd=repository, env=environment, capture_output=True)
        return found.returncode, log.read_text().splitlines() if log.exists() else [], repository

    return run


def test_a_release_builds_and_tries_all_images_before_it_pushes_any(release: Any) -> None:
    code, calls, _ = release("example.org/team", "--push")
    kinds = [each.split()[0] for each in calls]
    assert (code, kinds) == (0, ["build", "run"] * 4 + ["run"] + ["push"] * 4)
    assert calls[8].endswith(" demo")
    built = [each.split()[4] for each in calls if each.startswith("build")]
    assert [each.split()[1] for each in calls if each.startswith("push")] == built
    assert len(set(built)) == 4


@pytest.mark.parametrize("fails", ["build --file docker/worker", "worker-fleet", "demo"])
def test_a_release_with_an_image_that_does_not_work_pushes_nothing(release: Any, fails: str) -> None:
    code, calls, _ = release("example.org/team", "--push", fails=fails)
    assert code != 0
    assert not [each for each in calls if each.startswith("push")]


def test_a_release_is_of_a_commit(release: Any) -> None:
    _, _, repository = release("example.org/team")
    (repository / "new").touch()
    assert release("example.org/team")[:2] == (1, [])
