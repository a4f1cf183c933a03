"""Runs the remote commands as a user types them, each in a process of its own."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.integration.harness import jsonl


def start(url: str, *arguments: object, folder: Path | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "batchweave", *(str(each) for each in arguments)]
    environment = {**os.environ, "BATCHWEAVE_URL": url, "COLUMNS": "200"}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, **pipes, text=True, env=environment, cwd=folder, start_new_session=True)


async def run(url: str, *arguments: object, folder: Path | None = None) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command in `folder`; the jobs run beside it."""
    process = start(url, *arguments, folder=folder)
    output, errors = await asyncio.to_thread(process.communicate, None, 60)
    assert "Traceback" not in errors
    return process.returncode, output, errors


def write(folder: Path, lines: list[dict[str, Any]]) -> Path:
    """Write a file of requests, and return its path."""
    path = folder / "in.jsonl"
    path.write_bytes(jsonl(lines))
    return path
