"""What `make dist` builds can be installed into an environment of its own, and runs a file there."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).with_name("uv")
CHAT = "/v1/chat/completions"


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """What a command prints; a failure shows all of it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("BATCHWEAVE_", "PYTHON"))}
    found = subprocess.run(
        [str(each) for each in command], cwd=cwd, env=kept | variables, capture_output=True, text=True, timeout=500
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout + found.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not UV.exists(), reason="this environment was not made by make")
def test_a_wheel_in_an_environment_of_its_own_runs_a_file(tmp_path: Path) -> None:
    shutil.copytree(ROOT, tmp_path / "tree", ignore=shutil.ignore_patterns(".*", "__pycache__", "dist", "build"))
    for source in (tmp_path / "tree" / "client", tmp_path / "tree"):
        run(UV, "build", "--python", sys.executable, "-o", tmp_path / "dist", source, cwd=tmp_path)
    wheels = sorted((tmp_path / "dist").glob("*.whl"))
    assert [each.name.split("-")[0] for each in wheels] == ["batchweave", "batchweave_server"]
    assert len(list((tmp_path / "dist").glob("*.tar.gz"))) == 2
    run(UV, "venv", "--python", sys.executable, tmp_path / "venv", cwd=tmp_path)
    at = {"VIRTUAL_ENV": str(tmp_path / "venv")}
    run(UV, "pip", "install", "--require-hashes", "-r", ROOT / "requirements" / "server.txt", cwd=tmp_path, **at)
    run(UV, "pip", "install", "--no-deps", *wheels, cwd=tmp_path, **at)
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": CHAT,
            "body": {"model": "batchweave-demo", "messages": [{"role": "user", "content": f"say {number}"}]},
        }
        for number in range(3)
    ]
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    command = tmp_path / "venv" / "bin" / "batchweave"
    said = run(command, "run", "in.jsonl", "--output", "out.jsonl", "--engine", "scripted", cwd=tmp_path)
    assert "3 of 3 answered" in said
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {each["custom_id"] for each in answers} == {"0", "1", "2"}
    assert "SGLang is not installed" in run(command, "doctor", cwd=tmp_path)
