"""The contract with two versions of the official client against a running service: `make conformance`."""

import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.acceptance.service import Up

# 0.3.4 needs older versions of httpx than it asks for.
OTHER = "openai-batch==0.3.3"
PINNED = "2.6.1"  # as the engine's environment has it
MODEL = "batchweave-demo"


def client_python(folder: Path, *wanted: str) -> Path:
    """Python of an environment that has this client and nothing else of ours."""
    uv = Path(sys.executable).with_name("uv")
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, folder], check=True)
    subprocess.run([uv, "pip", "install", "-q", "--python", folder / "bin" / "python", *wanted], check=True)
    return folder / "bin" / "python"


def run(python: Path, script: str, url: str, *arguments: str) -> dict[str, str]:
    """By call, what came of it."""
    command = [python, Path(__file__).with_name(script), url, MODEL, *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return {found["call"]: found["said"] for found in map(json.loads, done.stdout.splitlines())}


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="batchweave-conformance-") as name:
        folder = Path(name)
        pythons = {
            f"openai {PINNED}": client_python(folder / "pinned", f"openai=={PINNED}"),
            "openai, newest": client_python(folder / "newest", "openai"),
        }
        other = client_python(folder / "other", OTHER, "openai<3", "httpx<0.29")
        up = Up.on(folder / "data")
        up.start()
        try:
            found = {client: run(python, "calls.py", f"{up.url}/v1") for client, python in pythons.items()}
            others = run(other, "openai_batch_run.py", f"{up.url}/v1", name)
        finally:
            up.stop()
    table = Table("call", *found, title=f"batchweave {version('batchweave')}")
    for call in next(iter(found.values())):
        table.add_row(call, *(each[call] for each in found.values()))
    Console(width=160).print(table)
    for call, said in others.items():
        print(f"{OTHER}, {call}: {said}")
    said = [said for each in (*found.values(), others) for said in each.values()]
    sys.exit(any(each != "ok" and not each.startswith("- ") for each in said))


if __name__ == "__main__":
    main()
