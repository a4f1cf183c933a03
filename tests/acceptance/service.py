"""`batchweave up` with real SGLang, as a user starts it, and the official client against it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import redis
from openai.types import Batch

from service.demo.prompts import CHAT
from tests.processes import words_of

ENDED = ("completed", "failed", "expired", "cancelled")


@dataclass
class Up:
    """A service on one data dir; it can be killed and started again there."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = None
    starts: int = field(default=0)
    variables: dict[str, str] = field(default_factory=dict[str, str])
    options: tuple[str, ...] = ()

    @classmethod
    def on(cls, folder: Path, *options: str) -> "Up":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return cls(folder, probe.getsockname()[1], options=options)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="k", max_retries=10)

    @property
    def redis(self) -> redis.Redis:
        return redis.Redis(unix_socket_path=str(self.folder / "redis" / "redis.sock"))

    def start(self) -> None:
        self.starts += 1
        command = [sys.executable, "-m", "batchweave", "up", "--data-dir", str(self.folder), "--port", str(self.port)]
        command += self.options
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "up.log").open("ab") as log:
            environment = {
                **os.environ,
                "BATCHWEAVE_MODEL": "tiny",
                "BATCHWEAVE_ENGINE_ARGS": '{"enable_deterministic_inference": true}',  # the same answer at each try
                "BATCHWEAVE_SLICE_REQUESTS": "32",
                **self.variables,
            }
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        self.until(lambda: httpx.get(f"{self.url}/readyz", timeout=5).status_code == 200, "the API to be ready")

    def until_engine(self, count: int = 1) -> None:
        self.until(lambda: httpx.get(f"{self.url}/readyz", timeout=5).json()["workers"] == count, "the engines")

    def until(self, condition: Callable[[], bool], what: str, timeout_s: float = 240) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            assert self.process is not None
            assert self.process.poll() is None, f"the service ended:\n{(self.folder / 'up.log').read_text()}"
            try:
                if condition():
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.05)
        raise AssertionError(f"waited {timeout_s:.0f} s for {what}")

    def stop(self, number: int = signal.SIGINT, within_s: float = 90) -> int:
        """Ctrl-C; returns the exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(within_s)

    def workers(self) -> list[psutil.Process]:
        assert self.process is not None
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if "worker" in words_of(child).split()]

    def worker(self) -> psutil.Process:
        return self.workers()[0]

    def worker_states(self) -> list[dict[str, Any]]:
        """What the API says of the workers."""
        return httpx.get(f"{self.url}/v1/workers", timeout=10).json()["data"]

    def worker_state(self) -> dict[str, Any]:
        """What the API says of the only worker."""
        return self.worker_states()[0]

    def family(self) -> list[psutil.Process]:
        """Every process of the service, the supervisor first."""
        assert self.process is not None
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def submit(self, lines: list[dict[str, Any]] | bytes, endpoint: str = CHAT, **arguments: Any) -> str:
        data = lines if isinstance(lines, bytes) else "".join(f"{json.dumps(line)}\n" for line in lines).encode()
        file = self.client.files.create(file=("in.jsonl", data), purpose="batch")
        create: Any = {"input_file_id": file.id, "endpoint": endpoint, "completion_window": "24h", **arguments}
        return self.client.batches.create(**create).id

    def wait(self, batch_id: str) -> Batch:
        self.until(lambda: self.client.batches.retrieve(batch_id).status in ENDED, f"{batch_id} to end")
        return self.client.batches.retrieve(batch_id)

    def done(self, batch_id: str) -> int:
        counts = self.client.batches.retrieve(batch_id).request_counts
        assert counts is not None
        return counts.completed + counts.failed

    def lines(self, file_id: str | None) -> dict[str, dict[str, Any]]:
        """A result file by custom_id; a custom_id that comes twice fails the test."""
        if file_id is None:
            return {}
        found = [json.loads(line) for line in self.client.files.content(file_id).text.splitlines()]
        by_id = {line["custom_id"]: line for line in found}
        assert len(by_id) == len(found), "a custom_id has two lines"
        return by_id

    def answers_on_disk(self) -> dict[str, str]:
        """Line ids by custom_id of every answer that shards hold now: what must never run again."""
        found: dict[str, str] = {}
        for folder, _, names in os.walk(self.folder / "objects" / "shards"):  # a folder of an ended batch may go
            for path in (Path(folder) / name for name in names if "#" not in name):
                with suppress(FileNotFoundError):
                    for line in (json.loads(raw)[4] for raw in path.read_bytes().split(b"\n") if raw):
                        found[line["custom_id"]] = line["id"]
        return found
