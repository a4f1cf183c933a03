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

PINNED = "2.6.1"  # as the engine's environment has it
MODEL = "batchweave-demo"


def client_python(folder: Path, wanted: str) -> Path:
    """Python of an environment that has this client and nothing else of ours."""
    uv = Path(sys.executable).with_name("uv")
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, folder], check=True)
    subprocess.run([uv, "pip", "install", "-q", "--python", folder / "bin" / "python", wanted], check=True)
    return folder / "bin" / "python"


def run(python: Path, url: str) -> dict[str, str]:
    """By call, what came of it."""
    command = [python, Path(__file__).with_name("calls.py"), url, MODEL]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return {found["call"]: found["said"] for found in map(json.loads, done.stdout.splitlines())}


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="batchweave-conformance-") as name:
        folder = Path(name)
        pythons = {
            f"openai {PINNED}": client_python(folder / "pinned", f"openai=={PINNED}"),
            "openai, newest": client_python(folder / "newest", "openai"),
        }
        up = Up.on(folder / "data")
        up.start()
        try:
            found = {client: run(python, f"{up.url}/v1") for client, python in pythons.items()}
        finally:
            up.stop()
    table = Table("call", *found, title=f"batchweave {version('batchweave')}")
    for call in next(iter(found.values())):
        table.add_row(call, *(each[call] for each in found.values()))
    Console(width=160).print(table)
    sys.exit(any(said != "ok" and not said.startswith("- ") for each in found.values() for said in each.values()))


if __name__ == "__main__":
    main()
