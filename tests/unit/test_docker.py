"""docker/ cannot be built by the tests; what can be checked without an engine is."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.cli.table import COMMANDS
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
