"""Uploads files, large ones in parts that are retried one by one."""

from pathlib import Path

import openai
from openai.types import FileObject
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from service.errors import CommandError
from service.terminal import said

PART_BYTES = 16 * 1024 * 1024


def upload(client: openai.OpenAI, path: Path) -> FileObject:
    """Upload a file, and return it as the service describes it. Raises CommandError and OSError."""
    size = path.stat().st_size
    if not size:
        raise CommandError(f"{path} is empty: it needs one request per line.")
    with path.open("rb") as opened:
        if size <= PART_BYTES:
            return client.files.create(file=(path.name, opened.read()), purpose="batch")
        begun = client.uploads.create(bytes=size, filename=path.name, mime_type="application/jsonl", purpose="batch")
        parts: list[str] = []
        columns = (TextColumn("upload"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, console=said, transient=True) as bar:
            task = bar.add_task("upload", total=size)
            while part := opened.read(PART_BYTES):
                parts.append(client.uploads.parts.create(begun.id, data=part).id)
                bar.advance(task, len(part))
    done = client.uploads.complete(begun.id, part_ids=parts)
    if done.file is None:
        raise CommandError(f"{path} was uploaded as {begun.id}, but the service returned no file for it.")
    return done.file
