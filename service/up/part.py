"""A part of `batchweave up`: a child process that is kept running, and ends with it."""

import ctypes
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import structlog

_PR_SET_PDEATHSIG = 1
log = structlog.get_logger()


def die_with_parent(signal_number: int = signal.SIGTERM) -> None:
    """Have Linux signal this process when its parent dies, even by kill -9."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal_number)


@dataclass(slots=True)
class Part:
    """A child process that is kept running."""

    name: str
    command: list[str]
    log_path: Path
    worker: str | None = None  # the name of its worker, if it is one
    changes: dict[str, str] = field(default_factory=dict[str, str])  # of the environment
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    begun: bool = False  # whether it has become ready since its start
    stage: str = ""  # the worker's stage that was printed last
    ask_at: float = 0.0  # when to ask next whether it has begun
    exits: int = 0  # exits since it was last ready, including the first one after that
    alike: int = 0  # of these, the last ones of which each ended as the one before
    ended: str = ""  # how it ended last, and its last words
    died_at: float = 0.0  # when; 0 while it is as it should be
    is_stopped: bool = False  # whether it ended as one that was asked to; a drained worker is then left alone
    log_from: int = 0  # where in its log the running process began
    restart_at: float = 0.0

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self, environment: dict[str, str]) -> None:
        with self.log_path.open("ab") as output:
            self.log_from = output.tell()
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**environment, **self.changes},
                start_new_session=True,  # Ctrl-C reaches only the supervisor, which stops its children in order
                preexec_fn=die_with_parent,
            )
        self.started_at, self.begun = time.time(), False

    def ask_to_stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()

    def end(self, timeout_s: float) -> None:
        """Wait for a part that was asked to stop, and kill it after the timeout."""
        if self.process is None or self.process.poll() is not None:
            return
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            log.warning("did not stop in time and was killed", part=self.name)
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
