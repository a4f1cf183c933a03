"""Fetching a file: what breaks off goes on where it ended, also in the next run of the command."""

import fcntl
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai

from service.remote.session import CommandError
from service.terminal import fail

ATTEMPTS = 8
PAUSE_S = 0.5
LONGEST_SUFFIX = f".file-{32 * '0'}-output.part"


def can_be_written(path: Path | None) -> Path | None:
    """Where the file will be, links followed. Of an option: ends the command for a path that no file can take."""
    if path is None:
        return None
    try:
        target = path.resolve()
        (target.parent / f"{target.name}{LONGEST_SUFFIX}").exists()  # raises for a name that is too long
        is_none = target.is_dir() or (target.exists() and not target.is_file())
    except (OSError, RuntimeError) as error:  # a loop of links, too
        fail(f"{str(path)[:200]}: cannot be written ({error}); choose another name.")
    if is_none:
        fail(f"{path} is no regular file; name a file to write.")
    if not target.parent.is_dir() or not os.access(target.parent, os.W_OK | os.X_OK):
        fail(f"{path}: nothing can be written in {target.parent}; choose another folder.")
    return target


def download(client: openai.OpenAI, file_id: str, path: Path) -> int:
    """Write the file to `path`, which is there only when it is whole; its bytes. Raises CommandError and OSError."""
    with _part(path, file_id) as part:
        for attempt in range(ATTEMPTS):
            try:
                _append(client, file_id, part)
                break
            except (httpx.TransportError, openai.APIConnectionError) as error:
                if attempt == ATTEMPTS - 1:
                    again = "The same command goes on from there."
                    raise CommandError(f"{file_id} breaks off ({error!r}). {again}") from error
                time.sleep(PAUSE_S * 2**attempt)
        os.replace(part, path)
    return path.stat().st_size


def take(client: openai.OpenAI, file_id: str, path: Path) -> int:
    """Write what there is now of a file that grows; its bytes. `path` is replaced only when all of that is here."""
    with _part(path, file_id) as part:
        with client.files.with_streaming_response.content(file_id) as answer:
            answer.stream_to_file(part)
        os.replace(part, path)
    return path.stat().st_size


@contextmanager
def _part(path: Path, file_id: str) -> Generator[Path, None, None]:
    """What is here of the file so far, in nobody else's hands."""
    part = path.with_name(f"{path.name}.{file_id}.part")
    with part.open("ab") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CommandError(f"{part} is being written by another run of this command.") from error
        yield part


def _append(client: openai.OpenAI, file_id: str, part: Path) -> None:
    """Add what is missing; files of the service never change, so their bytes fit together."""
    has, size = part.stat().st_size, client.files.retrieve(file_id).bytes
    if has == size:
        return
    if has > size:
        has = 0
    asked = {"Range": f"bytes={has}-"} if has else {}
    with client.files.with_streaming_response.content(file_id, extra_headers=asked) as answer:
        goes_on = answer.headers.get("content-range", "").startswith(f"bytes {has}-")
        with part.open("r+b") as opened:
            opened.seek(has if goes_on else 0)
            opened.truncate()
            for piece in answer.iter_bytes():
                opened.write(piece)
    if part.stat().st_size != size:
        raise httpx.ReadError(f"{part.stat().st_size} of {size} bytes came")
