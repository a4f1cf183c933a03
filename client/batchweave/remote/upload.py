"""Uploads files, large ones in parts that are retried one by one."""

from pathlib import Path
from typing import Any

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from batchweave.errors import CommandError
from batchweave.remote.client import Client, NotAService
from batchweave.remote.shapes import File
from batchweave.terminal import said

PART_BYTES = 16 * 1024 * 1024
MOST_PARTS = 10_000  # that the service takes


def upload(client: Client, path: Path) -> File:
    """Upload a file, and return it as the service describes it. Raises CommandError and OSError."""
    size = path.stat().st_size
    if not size:
        raise CommandError(f"{path} is empty: it needs one request per line.")
    with path.open("rb") as opened:
        if size <= PART_BYTES:
            sent = {"file": (path.name, opened.read())}
            return File.of(client.post("/files", files=sent, data={"purpose": "batch"}))
        about = {"bytes": size, "filename": path.name, "mime_type": "application/jsonl", "purpose": "batch"}
        begun = _id(client.post("/uploads", about))
        parts: list[str] = []
        columns = (TextColumn("upload"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, console=said, transient=True) as bar:
            task = bar.add_task("upload", total=size)
            while part := opened.read(max(PART_BYTES, -(-size // MOST_PARTS))):
                parts.append(_id(client.post(f"/uploads/{begun}/parts", files={"data": ("part", part)})))
                bar.advance(task, len(part))
    done = client.post(f"/uploads/{begun}/complete", {"part_ids": parts})
    return File.of(done.get("file") if isinstance(done, dict) else done)


def _id(told: Any) -> str:
    """Return the id of what was just created. Raises NotAService."""
    if not isinstance(told, dict) or not isinstance(told.get("id"), str):
        raise NotAService("what it created has no id")
    return told["id"]
