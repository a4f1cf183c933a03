"""`batchweave submit`: uploads a file, runs it as a batch, and fetches the results."""

import gzip
import json
import re
import time
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from batchweave.errors import CommandError
from batchweave.files import EXAMPLE, opened
from batchweave.remote.accept import AcceptOption, accept_of
from batchweave.remote.client import AnswerError, Away, Client, NotAService
from batchweave.remote.download import can_be_written, download
from batchweave.remote.follow import ENDED, extras, follow, report
from batchweave.remote.preview import can_ask, preview
from batchweave.remote.session import LOCAL_URL, NO_KEY, Exit, KeyOption, UrlOption, service_at
from batchweave.remote.shapes import Batch, File
from batchweave.remote.upload import upload
from batchweave.terminal import JsonOption, fail, interrupted, print_json, said

_ID = re.compile(r"file-\w+")
CHECKED_S = 5.0  # for which `submit` waits for the check of its file, whose faults it then says at once
FIRST_LINE_BYTES = 16 * 1024 * 1024
WaitOption = Annotated[bool, typer.Option("--wait", help="Show progress until the batch finishes.")]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", callback=can_be_written, help="Wait, then write the results here, errors beside it."
    ),
]


def _window(value: str) -> str:
    """Check the completion window, before anything is uploaded. Raises typer.BadParameter."""
    if not re.fullmatch(r"[1-9][0-9]{0,3}[mhd]", value):
        raise typer.BadParameter("write minutes, hours or days: 30m, 24h, 7d")
    return value


def submit(
    file: Annotated[
        Path,
        typer.Argument(help="JSONL file with one request per line, or the id of one from `batchweave files upload`."),
    ],
    wait: WaitOption = False,
    output: OutputOption = None,
    endpoint: Annotated[
        str | None, typer.Option("--endpoint", help="Endpoint of all requests; default: url of the first line.")
    ] = None,
    window: Annotated[str, typer.Option("--window", callback=_window, help="Completion window: 30m, 24h, 7d.")] = "24h",
    metadata: Annotated[list[str] | None, typer.Option("--metadata", help="name=value; repeatable.")] = None,
    in_order: Annotated[bool, typer.Option("--in-order", help="Results in input order.")] = False,
    fails_file: Annotated[
        bool,
        typer.Option("--long-lines-fail-file", help="Run nothing if the model cannot hold one of the requests."),
    ] = False,
    accept: AcceptOption = None,
    show_plan: Annotated[
        bool, typer.Option("--preview", help="Show time and cost first; hold the batch until you start it.")
    ] = False,
    as_json: JsonOption = False,
    url: UrlOption = LOCAL_URL,
    key: KeyOption = NO_KEY,
) -> None:
    """Upload a file, run it as a batch, and print the batch's id, once its file is checked or after five seconds.

    Ctrl-C stops watching, not the batch: `batchweave batches wait ID` watches it again. Exit codes: 0 done, 3 some
    requests failed, 4 the batch failed, expired or was cancelled, 1 anything else. Examples:

    - `batchweave submit requests.jsonl`
    - `batchweave submit requests.jsonl --output results.jsonl`
    - `batchweave submit requests.jsonl --preview`
    - `batchweave submit requests.jsonl --accept schema,finish,retries=1`
    - `batchweave submit requests.jsonl --wait --window 7d --metadata run=12 --url http://gpu-1:8080`
    """
    if show_plan and (wait or output) and not can_ask():
        fail(
            "--preview asks before it starts the batch; without a terminal, leave out --wait and --output, or --preview"
        )
    with service_at(url, key) as client:
        asked: dict[str, Any] = {"completion_window": window, "metadata": _pairs(metadata or [])}
        wishes: dict[str, Any] = {"output_order": "input"} if in_order else {}
        wishes |= {"on_long_line": "fail_file"} if fails_file else {}
        wishes |= {"hold": True} if show_plan else {}
        wishes |= {"accept": accept_of(accept)} if accept else {}
        if wishes:  # another service would not know them
            asked["batchweave"] = wishes
        is_uploaded = _ID.fullmatch(str(file)) is not None and not file.exists()
        asked["endpoint"] = endpoint or (_uploaded_endpoint(client, str(file)) if is_uploaded else _endpoint_of(file))
        uploaded = File.of(client.get(f"/files/{file}")) if is_uploaded else upload(client, file)
        try:
            batch = Batch.of(client.post("/batches", {**asked, "input_file_id": uploaded.id}))
        except AnswerError as error:
            if error.status == 400 and not is_uploaded:
                with suppress(AnswerError, Away):  # the first error matters more
                    client.delete(f"/files/{uploaded.id}")
            raise
        if show_plan and not extras(batch).get("held"):
            client.post(f"/batches/{batch.id}/cancel")
            raise CommandError(f"this service cannot hold a batch, so {batch.id} is cancelled. Leave out --preview.")
        said.print(f"{file} ({uploaded.bytes:,} bytes) {'is held' if show_plan else 'runs'} as {batch.id}")
        runs = True
        if show_plan:
            batch, runs = preview(client, batch.id)
        watched = runs and (wait or output is not None)
        if not (watched or show_plan):
            batch = _checked(client, batch)
        is_warned = show_plan or not watched
        code = started(client, batch, watched or batch.status in ENDED, output, as_json, is_warned)
    raise typer.Exit(code)


def _checked(client: Client, batch: Batch) -> Batch:
    """Wait until the batch's file is checked, for some seconds at most; return the batch as it is then."""
    ends_at = time.monotonic() + CHECKED_S
    # The batch is there, and runs, whatever is heard of it now.
    with suppress(AnswerError, Away, NotAService, KeyboardInterrupt), client.trying_once(CHECKED_S):
        return follow(client, batch.id, lambda each: each.status != "validating" or time.monotonic() >= ends_at)
    return batch


def started(
    client: Client, batch: Batch, wait: bool, output: Path | None, as_json: bool, is_warned: bool = False
) -> Exit:
    """Watch a new batch if `wait` says so, then print it, and return the exit code; `is_warned` as in `follow`."""
    code = Exit.DONE
    if wait:
        batch, code = watch(client, batch.id, output, is_warned)
    if as_json:
        print_json(batch.raw)
    else:
        print(batch.id)
    return code


def watch(client: Client, batch_id: str, output: Path | None, is_warned: bool = False) -> tuple[Batch, Exit]:
    """Follow a batch until it finishes, print how it ended, and fetch its files; `is_warned` as in `follow`."""
    try:
        batch = follow(client, batch_id, is_warned=is_warned)
    except KeyboardInterrupt:
        where = f" --output {output}" if output else ""
        interrupted(f"{batch_id} continues. To watch it again: batchweave batches wait {batch_id}{where}")
    code = report(batch)
    outcomes = extras(batch).get("outcomes") or {}
    if batch.status in ENDED and outcomes.get("cut_off"):
        said.print(f"to answer again what was cut off: batchweave batches retry {batch_id} --cut-off --max-tokens N")
    if batch.status in ENDED and outcomes.get("not_accepted"):
        said.print(f"to ask again for what was not accepted: batchweave batches retry {batch_id} --max-tokens N")
    if output is not None:
        fetch(client, batch, output)
    return batch, code


def fetch(client: Client, batch: Batch, output: Path) -> dict[str, str]:
    """Write a batch's results to `output` and its error lines beside it; return the path of each file written."""
    found: dict[str, str] = {}
    for kind, file_id, path in (
        ("results", batch.output_file_id, output),
        ("errors", batch.error_file_id, output.with_name(f"{output.stem}.errors{output.suffix}")),
    ):
        if file_id:
            said.print(f"{kind}: {path} ({download(client, file_id, path):,} bytes)")
            found[kind] = str(path)
        elif path.exists():
            said.print(f"no {kind}: {path} is from an earlier run, and left as it is", style="yellow")
        elif kind == "results":
            said.print(f"no results: {batch.id} has no successful request")
    return found


def _endpoint_of(path: Path) -> str:
    try:
        with opened(path) as file:
            return _first_url(iter(lambda: file.readline(FIRST_LINE_BYTES), b""), str(path))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise CommandError(f"{path}: the gzip file is damaged: {error}") from error


def _uploaded_endpoint(client: Client, file_id: str) -> str:
    with client.content(file_id, {"Range": f"bytes=0-{FIRST_LINE_BYTES - 1}"}) as answer:
        return _first_url(b"".join(answer.iter_bytes()).split(b"\n"), file_id)


def _first_url(lines: Iterable[bytes], name: str) -> str:
    for line in lines:
        if line.strip():
            try:
                return str(json.loads(line.decode("utf-8-sig"))["url"])
            except (ValueError, KeyError, TypeError) as error:
                raise CommandError(
                    f'{name}: its first line is not a request with a "url". One looks so: {EXAMPLE}'
                ) from error
    raise CommandError(f"{name} is empty: it needs one request per line.")


def _pairs(given: list[str]) -> dict[str, str] | None:
    pairs: dict[str, str] = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not equals or not name:
            raise CommandError(f"--metadata {each}: write name=value.")
        pairs[name] = value
    return pairs or None
