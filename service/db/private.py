"""Hides what a process writes from other users of the machine."""

import os
from contextlib import suppress
from pathlib import Path

from sqlalchemy import make_url

from service.settings import Settings


def keep_private(settings: Settings) -> None:
    """Make this process's files, and an existing SQLite database, unreadable to other users, whatever the umask."""
    os.umask(0o077)
    place = make_url(settings.database)
    if place.get_backend_name() == "sqlite":
        for each in (place.database, f"{place.database}-wal", f"{place.database}-shm"):
            with suppress(OSError):
                Path(each or "").chmod(0o600)
