"""Runs `batchweave up` as a child of a command, or finds the one that already runs on a data folder."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from service.errors import CommandError
from service.settings import Settings
from service.terminal import said
from service.up.supervisor import die_with_parent, told_by

START_S, STOP_S = 120.0, 60.0
LOOK_S = 0.2
LOG = "up.log"


@dataclass(slots=True)
class Service:
    """The service on a data folder. `process` is None if somebody else runs it."""

    url: str
    folder: Path
    process: subprocess.Popen[bytes] | None = None

    def check(self) -> None:
        """Raise CommandError if the service has ended."""
        if self.process is not None and self.process.poll() is not None:
            raise CommandError(f"the service ended: {self.last_words()} Run the same command again to continue.")
        if self.process is None and not _is_locked(self.folder):
            raise CommandError("the service was stopped. Run the same command again: it starts its own and continues.")

    def last_words(self) -> str:
        """Return the last line that the child printed, which says why it ended."""
        lines = (self.folder / LOG).read_text(errors="replace").strip().splitlines()
        return f"{lines[-1].removeprefix('error: ')}" if lines else f"see {self.folder / LOG}."


@contextmanager
def service_on(settings: Settings, options: Sequence[str]) -> Generator[Service, None, None]:
    """Yield the service on the settings' data folder: the one that runs, or a child with these options of `up`.

    A child is stopped at the end of the block, and ends too if this process is killed. Raises CommandError.
    """
    folder = settings.data_dir.resolve()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    deadline, is_told = time.monotonic() + START_S, False
    while _is_locked(folder):
        _, url = told_by(folder)
        if url and _is_up(url):
            said.print(f"joins the service on {folder}: {url}")
            yield Service(url, folder)
            return
        if time.monotonic() > deadline:
            raise CommandError(f"a service holds {folder} and does not answer; stop it, or choose another --data-dir.")
        if not is_told:
            said.print("waits for the service on this data folder, which starts or stops")
            is_told = True
        time.sleep(LOOK_S)
    port = settings.port if _is_free(settings.port) else 0
    command = [sys.executable, "-m", "service.cli", "up", "--data-dir", str(folder), "--host", "127.0.0.1"]
    command += ["--port", str(port or _free_port()), *options]
    with (folder / LOG).open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            preexec_fn=die_with_parent,
        )  # fmt: skip
    try:
        yield _started(process, folder, deadline)
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said.print(f"the service did not stop within {STOP_S:.0f} s and was killed; see {folder / LOG}")


def _started(process: subprocess.Popen[bytes], folder: Path, deadline: float) -> Service:
    service = Service("", folder, process)
    with said.status("starts the service"):
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise CommandError(f"the service did not start: {service.last_words()}")
            holder, url = told_by(folder)
            if holder == str(process.pid) and url and _is_up(url):
                service.url = url
                said.print(f"dashboard: {url}/dashboard")
                return service
            time.sleep(LOOK_S)
    raise CommandError(f"the service was not ready after {START_S:.0f} s; see {folder / LOG}.")


def _is_locked(folder: Path) -> bool:
    try:
        with (folder / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False


def _is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=2, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
