"""Fetching a file: what breaks off goes on where it ended, also in the next run of the command."""

import os
import time
from pathlib import Path

import httpx
import openai

from service.remote.session import CommandError

ATTEMPTS = 8
PAUSE_S = 0.5
PARTIAL_CONTENT = 206


def download(client: openai.OpenAI, file_id: str, path: Path) -> int:
    """Write the file to `path`, which is there only when it is whole; its bytes. Raises CommandError and OSError."""
    part = path.with_name(f"{path.name}.{file_id}.part")
    for attempt in range(ATTEMPTS):
        try:
            _append(client, file_id, part)
            break
        except (httpx.TransportError, openai.APIConnectionError) as error:
            if attempt == ATTEMPTS - 1:
                raise CommandError(f"{file_id} breaks off ({error!r}). The same command goes on from there.") from error
            time.sleep(PAUSE_S * 2**attempt)
    os.replace(part, path)
    return path.stat().st_size


def _append(client: openai.OpenAI, file_id: str, part: Path) -> None:
    """Add what is missing; files of the service never change, so their bytes fit together."""
    has = part.stat().st_size if part.exists() else 0
    size = client.files.retrieve(file_id).bytes
    if 0 < size <= has:
        return
    asked = {"Range": f"bytes={has}-"} if has else {}
    with client.files.with_streaming_response.content(file_id, extra_headers=asked) as answer:
        mode = "ab" if answer.status_code == PARTIAL_CONTENT else "wb"
        with part.open(mode) as opened:
            for piece in answer.iter_bytes():
                opened.write(piece)
    if part.stat().st_size != size:
        raise httpx.ReadError(f"{part.stat().st_size} of {size} bytes came")
