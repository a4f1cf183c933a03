"""Runs the remote commands as a user types them, each in a process of its own."""

import asyncio
import os
import subprocess
import sys


def start(url: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "service.cli", *(str(each) for each in arguments)]
    environment = {**os.environ, "BATCHWEAVE_URL": url, "COLUMNS": "200"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )


async def run(url: str, *arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command; the jobs run beside it."""
    process = start(url, *arguments)
    output, errors = await asyncio.to_thread(process.communicate, None, 60)
    assert "Traceback" not in errors
    return process.returncode, output, errors
