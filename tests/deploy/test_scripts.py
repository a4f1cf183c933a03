"""The scripts of Slurm, SkyPilot and systemd parse, and name only commands and settings that there are."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from batchweave.table import COMMANDS
from service.settings import NOT_SETTINGS, Settings

DEPLOY = Path(__file__).parents[2] / "deploy"
FILES = sorted(each for each in DEPLOY.rglob("*") if each.is_file())
SBATCH = sorted((DEPLOY / "slurm").glob("*.sbatch"))
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
OF_SCRIPTS = {"BATCHWEAVE_ENV"}  # variables of their own


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_variable_is_a_setting(path: Path) -> None:
    known = {f"BATCHWEAVE_{name.upper()}" for name in Settings.model_fields} | NOT_SETTINGS | OF_SCRIPTS
    assert set(re.findall(r"BATCHWEAVE_[A-Z_]*[A-Z]", path.read_text())) <= known


@pytest.mark.parametrize("path", [*SBATCH, *UNITS, DEPLOY / "skypilot.yaml"], ids=lambda path: path.name)
def test_every_command_exists(path: Path) -> None:
    text = "\n".join(line for line in path.read_text().splitlines() if not line.startswith("#"))
    found = re.findall(r"(?:bin/|srun (?:--\S+ )*)batchweave (\w+)", text)
    assert found
    assert set(found) <= set(COMMANDS)


@pytest.mark.parametrize("path", SBATCH, ids=lambda path: path.name)
def test_slurm_scripts_parse(path: Path) -> None:
    assert subprocess.run(["bash", "-n", path], capture_output=True, text=True).stderr == ""
    text = path.read_text()
    assert text.startswith("#!"), "sbatch refuses a script without it"
    options = re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", text, re.MULTILINE)
    assert {"requeue", "signal", "time"} <= {name for name, _ in options}


@pytest.mark.parametrize("path", SBATCH, ids=lambda path: path.name)
def test_slurm_accepts_the_scripts(path: Path) -> None:
    if not shutil.which("sbatch"):
        pytest.skip("there is no Slurm here")
    asked = subprocess.run(["sbatch", "--test-only", path], capture_output=True, text=True)
    assert "unrecognized option" not in asked.stderr
    assert "Invalid" not in asked.stderr


@pytest.mark.parametrize("asked", [False, True], ids=["ended by itself", "time is up"])
@pytest.mark.parametrize("path", SBATCH, ids=lambda path: path.name)
def test_a_slurm_job_stops_its_workers_and_queues_again_when_its_time_is_up(
    path: Path, asked: bool, tmp_path: Path
) -> None:
    """With commands that stand in for Slurm's: what the script itself does is real."""
    (tmp_path / "env").write_text("BATCHWEAVE_MODEL=m\n")
    stands_in = {
        "srun": '#!/usr/bin/env bash\ntrap "echo stopped >> log; exit 7" TERM\necho "$@" >> log; env >> variables\n'
        + ("for ((n = 0; n < 600; n++)); do sleep 0.1; done" if asked else "exit 3"),
        "scontrol": '#!/usr/bin/env bash\necho scontrol "$@" >> log\n',
    }
    for name, script in stands_in.items():
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "BATCHWEAVE_ENV": str(tmp_path / "env"), "SLURM_JOB_ID": "12"}
    job = subprocess.Popen(["bash", path], cwd=tmp_path, env=variables)
    if asked:
        while not (tmp_path / "variables").exists():
            assert job.poll() is None
        job.terminate()
    assert job.wait(60) == (7 if asked else 3)
    said = (tmp_path / "log").read_text().splitlines()
    assert said[0].endswith("batchweave worker")
    assert said[1:] == (["stopped", "scontrol requeue 12"] if asked else [])
    assert "BATCHWEAVE_MODEL=m" in (tmp_path / "variables").read_text()


@pytest.mark.parametrize("path", SBATCH, ids=lambda path: path.name)
def test_a_slurm_job_that_is_stopped_before_it_began_queues_again(path: Path, tmp_path: Path) -> None:
    """While it reads its settings: srun is started, and told to end at once."""
    (tmp_path / "env").write_text("kill -TERM $$\n")
    stands_in = {
        "srun": 'trap "exit 7" TERM\nfor ((n = 0; n < 600; n++)); do sleep 0.1; done',
        "scontrol": "echo $@ >> log",
    }
    for name, script in stands_in.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "BATCHWEAVE_ENV": str(tmp_path / "env"), "SLURM_JOB_ID": "12"}
    ended = subprocess.run(["bash", path], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=60)
    assert (ended.returncode in (7, 143), ended.stderr) == (True, "")  # 143: before srun could say otherwise
    assert (tmp_path / "log").read_text() == "requeue 12\n"


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_understands_the_units(path: Path) -> None:
    if not shutil.which("systemd-analyze"):
        pytest.skip("there is no systemd here")
    asked = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True)
    assert not [line for line in asked.stderr.splitlines() if "Unknown" in line or "Failed to parse" in line]


def test_skypilot_gets_the_secrets_apart_from_the_rest() -> None:
    task = yaml.safe_load((DEPLOY / "skypilot.yaml").read_text())
    assert set(task) == {"name", "num_nodes", "resources", "envs", "secrets", "workdir", "setup", "run"}
    assert not [name for name in task["envs"] if "KEY" in name or name.endswith(("DATABASE_URL", "REDIS_URL"))]
