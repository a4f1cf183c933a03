"""Runs `batchweave up` as a child of a command, or finds the one that already runs on a data folder."""

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

from batchweave.errors import CommandError
from batchweave.terminal import said
from service.settings import Settings
from service.up.folder_lock import is_locked, told_by
from service.up.part import die_with_parent

START_S, STOP_S = 120.0, 60.0
LOOK_S = 0.2
LOG = "up.log"


class ServiceGone(CommandError):
    """The service that was joined has been stopped by who runs it."""


@dataclass(slots=True)
class Service:
    """The service on a data folder. `process` is None if somebody else runs it."""

    url: str
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    log_from: int = 0  # where the child's lines begin in the log

    def check(self) -> None:
        """Raise CommandError if the service has ended; that is ServiceGone if it was joined."""
        if self.process is not None:
            if self.process.poll() is not None:
                raise CommandError(f"the service ended: {self.last_words()} Run the same command again to continue.")
        elif not is_locked(self.folder) or told_by(self.folder)[1] != self.url:  # killed, or stopped
            raise ServiceGone("the service that was joined has ended")

    def last_words(self) -> str:
        """Return the last line that the child printed, which says why it ended."""
        with (self.folder / LOG).open("rb") as log:
            log.seek(self.log_from)
            lines = log.read().decode(errors="replace").strip().splitlines()
        return lines[-1].removeprefix("error: ") if lines else f"see {self.folder / LOG}."


@contextmanager
def service_on(settings: Settings, options: Sequence[str], is_open: bool) -> Generator[Service, None, None]:
    """Yield the service on the settings' data folder: the one that runs, or a child with these options of `up`.

    A child is stopped at the end of the block, and ends too if this process is killed. `is_open`: it requires no keys.
    Raises CommandError.
    """
    folder = settings.data_dir.resolve()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    deadline, is_told = time.monotonic() + START_S, False
    while True:
        while is_locked(folder):
            _, url = told_by(folder)
            if url and _is_up(url, settings):
                said.print(f"joins the service on {folder}, with its model, engines and GPUs: {url}")
                yield Service(url, folder)
                return
            if time.monotonic() > deadline:
                raise CommandError(f"a service holds {folder} and does not answer; stop it, or use another --data-dir.")
            if not is_told:
                said.print("waits for the service on this data folder, which starts or stops")
                is_told = True
            time.sleep(LOOK_S)
        with _child(folder, options, is_open) as service:
            if _has_started(service, settings, deadline):
                said.print(f"dashboard: {service.url}/dashboard")
                yield service
                return


@contextmanager
def _child(folder: Path, options: Sequence[str], is_open: bool) -> Generator[Service, None, None]:
    command = [sys.executable, "-m", "batchweave", "up", "--data-dir", str(folder), "--host", "127.0.0.1"]
    command += ["--port", str(_free_port()), *options]
    environment = os.environ | ({"BATCHWEAVE_AUTH": "none"} if is_open else {})
    with (folder / LOG).open("ab") as output:
        log_from = output.tell()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env=environment,
            preexec_fn=die_with_parent,
        )
    try:
        yield Service("", folder, process, log_from)
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said.print(f"the service did not stop within {STOP_S:.0f} s and was killed; see {folder / LOG}")


def _has_started(service: Service, settings: Settings, deadline: float) -> bool:
    """Wait until the child serves; return False if another service took the folder before it. Raises CommandError."""
    assert service.process is not None
    with said.status("starts the service"):
        while time.monotonic() < deadline:
            if service.process.poll() is not None:
                if is_locked(service.folder):
                    return False
                raise CommandError(f"the service did not start: {service.last_words()}")
            holder, url = told_by(service.folder)
            if holder == str(service.process.pid) and url and _is_up(url, settings):
                service.url = url
                return True
            time.sleep(LOOK_S)
    raise CommandError(f"the service was not ready after {START_S:.0f} s; see {service.folder / LOG}.")


def _is_up(url: str, settings: Settings) -> bool:
    """Return whether the API of this data folder answers, and not one that has taken its port."""
    try:
        found = httpx.get(f"{url}/readyz", timeout=2, trust_env=False)
        return found.status_code == 200 and found.json().get("folder") == settings.folder_digest
    except (httpx.HTTPError, ValueError):
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
