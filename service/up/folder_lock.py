"""The lock on a data folder: one `batchweave up` runs on it, and says there who it is and where its API is."""

import fcntl
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from service.errors import StartError

TRIES, PAUSE_S = 5, 0.05


@dataclass(slots=True)
class FolderLock:
    """The lock of a service on its data folder. It is held until the process ends."""

    folder: Path
    _file: IO[str] | None = None

    def take(self) -> None:
        """Take the lock. Raises StartError if another service has it."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._file = (self.folder / "lock").open("a+")
        for left in reversed(range(TRIES)):
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:  # who only looks whether a service runs has it for a moment
                if not left:
                    pid = told_by(self.folder)[0] or "unknown"
                    raise StartError(
                        f"batchweave is already running on {self.folder} (pid {pid}). Stop it, or choose another "
                        "--data-dir."
                    ) from None
                time.sleep(PAUSE_S)
        self.tell("")

    def tell(self, url: str) -> None:
        """Write down who has the lock and where its API is, for `told_by`; no URL while it starts or stops."""
        if self._file is not None:
            self._file.truncate(0)
            self._file.write(f"{os.getpid()}\n{url}\n")
            self._file.flush()


def told_by(folder: Path) -> tuple[str, str]:
    """Return the process id of the service that held a data folder last, and the URL of its API.

    The URL is empty while it starts or stops.
    """
    try:
        lines = (folder / "lock").read_text(errors="replace").splitlines()
    except FileNotFoundError:
        lines = []
    return lines[0] if lines else "", lines[1] if len(lines) > 1 else ""


def is_locked(folder: Path) -> bool:
    """Return whether a service runs on the folder; a look takes the lock for a moment."""
    try:
        with (folder / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False
