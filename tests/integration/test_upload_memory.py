"""A large upload streams through: the API's memory does not grow with the file."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import httpx
import openai
import psutil
import pytest

SIZE = 200 * 1024 * 1024
ALLOWED_GROWTH = 64 * 1024 * 1024


@pytest.fixture
def api(tmp_path: Path, redis_url: str) -> Generator[tuple[str, psutil.Process], None, None]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "BATCHWEAVE_DATA_DIR": str(tmp_path / "data"),
        "BATCHWEAVE_DATABASE_URL": f"sqlite:///{tmp_path / 'api.db'}",
        "BATCHWEAVE_REDIS_URL": redis_url,
    }
    process = subprocess.Popen([sys.executable, "-m", "service.cli", "api", "--port", str(port)], env=environment)
    url = f"http://127.0.0.1:{port}"
    for _ in range(300):
        try:
            if httpx.get(f"{url}/healthz").status_code == 200:
                break
        except httpx.HTTPError:
            time.sleep(0.1)
    yield url, psutil.Process(process.pid)
    process.terminate()
    assert process.wait(20) in (0, -signal.SIGTERM)  # uvicorn drains, then lets the signal have its way


def peak_rss(process: psutil.Process) -> int:
    """High-water mark of the process's memory, in bytes, since it started or was last reset."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def test_upload_of_200_mb_grows_memory_by_less_than_64(tmp_path: Path, api: tuple[str, psutil.Process]) -> None:
    url, process = api
    path = tmp_path / "large.jsonl"
    with path.open("wb") as file:
        for _ in range(SIZE // 1024):
            file.write(b"x" * 1023 + b"\n")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)
    with path.open("rb") as small:  # warm: what the first upload of any size needs
        client.files.create(file=("small", small.read(1000)), purpose="batch")
    before = process.memory_info().rss
    with path.open("rb") as file:
        made = client.files.create(file=file, purpose="batch")
    assert made.bytes == SIZE
    assert peak_rss(process) - before < ALLOWED_GROWTH
    with client.files.with_streaming_response.content(made.id) as response:
        assert sum(len(chunk) for chunk in response.iter_bytes(1 << 20)) == SIZE
    assert peak_rss(process) - before < ALLOWED_GROWTH
