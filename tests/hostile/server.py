"""The service's roles as processes of their own, whose memory and log can be looked at."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import httpx
import psutil
import redis

from service.up.embedded_redis import server_command

SECRET = "of these tests alone"


@dataclass(frozen=True)
class Role:
    process: psutil.Process
    log: Path
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def failures(self) -> list[str]:
        """Lines of its log that tell of an error that nobody foresaw."""
        lines = self.log.read_text().splitlines()
        return [line for line in lines if any(each in line for each in ("Traceback", "request failed", "job failed"))]

    def forget_peak(self) -> None:
        """The high-water mark begins again at what it holds now."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    @property
    def peak_rss(self) -> int:
        """High-water mark of its memory in bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


@contextmanager
def redis_server(folder: Path) -> Generator[str, None, None]:
    """Run Redis in `folder` until the end of the block; yields its URL."""
    path = folder / "redis.sock"
    server = subprocess.Popen(server_command(path, folder), stdout=subprocess.DEVNULL)
    try:
        while True:
            assert server.poll() is None, "Redis did not start"
            with suppress(redis.RedisError):
                redis.Redis(unix_socket_path=str(path)).ping()
                break
            time.sleep(0.05)
        yield f"unix://{path}"
    finally:
        server.terminate()
        server.wait()


@contextmanager
def running(
    role: str,
    folder: Path,
    database_url: str,
    redis_url: str,
    *arguments: str,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Generator[Role, None, None]:
    """`batchweave api` or another role, until the end of the block; `variables` of its environment come on top."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "BATCHWEAVE_SECRET_KEY": SECRET,
        "BATCHWEAVE_DATA_DIR": str(folder / "data"),
        "BATCHWEAVE_DATABASE_URL": database_url,
        "BATCHWEAVE_REDIS_URL": redis_url,
        "BATCHWEAVE_PORT": str(port),
        **variables,
    }
    log = folder / f"{variables.get('BATCHWEAVE_WORKER_NAME', role)}.log"
    with log.open("wb") as output:
        command = [sys.executable, "-m", "batchweave", role, *arguments]
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    found = Role(psutil.Process(process.pid), log, port)
    try:
        if role == "api":
            _until_healthy(found)
        yield found
    finally:
        family = [found.process, *found.process.children(recursive=True)] if process.poll() is None else []
        process.terminate()
        try:
            status = process.wait(120)
        finally:
            for each in family:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
        assert status in (0, -signal.SIGTERM)  # uvicorn drains, then lets the signal have its way


def _until_healthy(api: Role) -> None:
    for _ in range(600):
        try:
            if httpx.get(f"{api.url}/healthz").status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.1)
    raise AssertionError(api.log.read_text())
