"""Downloads files. An interrupted download resumes where it stopped, also in the next run of the command."""

import fcntl
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import httpx

from batchweave.errors import CommandError
from batchweave.remote.client import Away, Client
from batchweave.remote.shapes import File
from batchweave.terminal import fail

ATTEMPTS = 8
PAUSE_S = 0.5
LONGEST_SUFFIX = f".file-{32 * '0'}-output.part"


def can_be_written(path: Path | None) -> Path | None:
    """Return an output option's path with links resolved. Ends the command if no file can be written there."""
    if path is None:
        return None
    try:
        target = path.resolve()
        (target.parent / f"{target.name}{LONGEST_SUFFIX}").exists()  # raises for a name that is too long
        is_none = target.is_dir() or (target.exists() and not target.is_file())
    except (OSError, RuntimeError) as error:  # a loop of links, too
        fail(f"{str(path)[:200]}: cannot be written ({error}); choose another name.")
    if is_none:
        fail(f"{path} is not a regular file; choose a file to write.")
    if not target.parent.is_dir() or not os.access(target.parent, os.W_OK | os.X_OK):
        fail(f"{path}: cannot write to {target.parent}; choose another folder.")
    return target


def download(client: Client, file_id: str, path: Path, is_new: bool = False) -> int:
    """Write a file to `path`, which appears only when complete; return its size. Raises CommandError and OSError.

    With `is_new`, it replaces no file.
    """
    with _part(path, file_id) as part:
        for attempt in range(ATTEMPTS):
            try:
                _append(client, file_id, part)
                break
            except (httpx.TransportError, Away) as error:
                if attempt == ATTEMPTS - 1:
                    again = "Run the same command again to resume it."
                    raise CommandError(f"The download of {file_id} was interrupted ({error!r}). {again}") from error
                time.sleep(PAUSE_S * 2**attempt)
        if is_new:
            try:
                path.touch(exist_ok=False)
            except FileExistsError as error:
                raise CommandError(f"{path} exists now; run the command again with --output FILE.") from error
        os.replace(part, path)
    return path.stat().st_size


def take(client: Client, file_id: str, path: Path) -> int:
    """Write the current content of a growing file to `path`, and return its size.

    `path` is replaced only once all of that content has arrived.
    """
    with _part(path, file_id) as part:
        with client.content(file_id) as answer, part.open("wb") as opened:
            for piece in answer.iter_bytes():
                opened.write(piece)
        os.replace(part, path)
    return path.stat().st_size


@contextmanager
def _part(path: Path, file_id: str) -> Generator[Path, None, None]:
    """Lock the part of the file downloaded so far, and yield its path. Raises CommandError."""
    part = path.with_name(f"{path.name}.{file_id}.part")
    with part.open("ab") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CommandError(f"{part} is being written by another run of this command.") from error
        yield part


def _append(client: Client, file_id: str, part: Path) -> None:
    """Download the missing bytes. Files of the service never change, so the parts fit together."""
    has, size = part.stat().st_size, File.of(client.get(f"/files/{file_id}")).bytes
    if has == size:
        return
    if has > size:
        has = 0
    asked = {"Range": f"bytes={has}-"} if has else {}
    with client.content(file_id, asked) as answer:
        goes_on = answer.headers.get("content-range", "").startswith(f"bytes {has}-")
        with part.open("r+b") as opened:
            opened.seek(has if goes_on else 0)
            opened.truncate()
            for piece in answer.iter_bytes():
                opened.write(piece)
    if part.stat().st_size != size:
        raise httpx.ReadError(f"received {part.stat().st_size} of {size} bytes")
