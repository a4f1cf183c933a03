"""`batchweave files …`: list, upload, download and delete batch inputs and results."""

import os
import time
from pathlib import Path, PurePath
from typing import Annotated

import typer

from batchweave.remote.download import can_be_written, download
from batchweave.remote.session import LOCAL_URL, NO_KEY, KeyOption, UrlOption, named, service_at
from batchweave.remote.shapes import File
from batchweave.remote.upload import upload
from batchweave.terminal import JsonOption, duration, fail, print_json, print_table, said

app = typer.Typer(no_args_is_help=True, help="List, upload, download and delete files: batch inputs and results.")
MOST_NAME = 120  # characters, with room for what is added while it is downloaded
FileId = Annotated[str, typer.Argument(help="Id of a file: file-…", metavar="ID", callback=named)]


@app.command("list")
def list_files(
    purpose: Annotated[
        str | None, typer.Option("--purpose", help="Show only this purpose: batch or batch_output.")
    ] = None,
    count: Annotated[int, typer.Option("--count", min=1, max=100_000, help="Show at most this many files.")] = 20,
    as_json: JsonOption = False,
    url: UrlOption = LOCAL_URL,
    key: KeyOption = NO_KEY,
) -> None:
    """List your files, newest first."""
    found: list[File] = []
    with service_at(url, key) as client:
        for file in map(File.of, client.every("/files", purpose=purpose)):
            found.append(file)
            if len(found) == count:
                break
        if as_json:
            print_json([file.raw for file in found])
            return
        print_table(("id", "purpose", "bytes", "age", "name"), [_row(file) for file in found])


@app.command("show")
def show_file(
    file_id: FileId, as_json: JsonOption = False, url: UrlOption = LOCAL_URL, key: KeyOption = NO_KEY
) -> None:
    """Show one file, without its content."""
    with service_at(url, key) as client:
        file = File.of(client.get(f"/files/{file_id}"))
        if as_json:
            print_json(file.raw)
            return
        print_table(("id", "purpose", "bytes", "age", "name"), [_row(file)])


@app.command("upload")
def upload_file(
    file: Annotated[Path, typer.Argument(help="JSONL file with one request per line.")],
    as_json: JsonOption = False,
    url: UrlOption = LOCAL_URL,
    key: KeyOption = NO_KEY,
) -> None:
    """Upload a file without running it, and print its id."""
    with service_at(url, key) as client:
        uploaded = upload(client, file)
        if as_json:
            print_json(uploaded.raw)
        else:
            print(uploaded.id)


@app.command("download")
def download_file(
    file_id: FileId,
    output: Annotated[
        Path | None,
        typer.Option(
            *("--output", "-o"),
            help="File to write; default: a new one here, of the file's own name.",
            callback=can_be_written,
        ),
    ] = None,
    as_json: JsonOption = False,
    url: UrlOption = LOCAL_URL,
    key: KeyOption = NO_KEY,
) -> None:
    """Download a file. If it is interrupted, run the command again to resume."""
    with service_at(url, key) as client:
        path = output or _new_file(File.of(client.get(f"/files/{file_id}")))
        size = download(client, file_id, path, is_new=output is None)
        if as_json:
            print_json({"file": str(path), "bytes": size})
            return
        said.print(f"{path} ({size:,} bytes)")


@app.command("delete")
def delete_file(
    file_id: FileId, as_json: JsonOption = False, url: UrlOption = LOCAL_URL, key: KeyOption = NO_KEY
) -> None:
    """Delete a file permanently."""
    with service_at(url, key) as client:
        deleted = client.delete(f"/files/{file_id}")
        if as_json:
            print_json(deleted)
            return
        said.print(f"{file_id} is deleted")


def _new_file(file: File) -> Path:
    """Return where a file goes by its own name. Ends the command if there is such a file, or none can be written."""
    name = PurePath(file.filename).name  # the service's word: it must not leave this folder
    if not name.isprintable() or name.startswith((".", "-")) or not 0 < len(name) <= MOST_NAME:
        fail(f"{file.id} is named {file.filename[:100]!r}, which is no good name here; use --output FILE.")
    if os.path.lexists(name):
        fail(f"{name} exists here; use --output FILE, which replaces a file.")
    if not os.access(".", os.W_OK | os.X_OK):
        fail("cannot write to this folder; use --output FILE.")
    return Path(name)


def _row(file: File) -> tuple[str, ...]:
    return file.id, file.purpose, f"{file.bytes:,}", duration(time.time() - file.created_at), file.filename
