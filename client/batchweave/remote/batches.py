"""`batchweave batches …`: list, watch, start, cancel and retry batches, and fetch their results."""

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from batchweave.errors import CommandError
from batchweave.remote.accept import AcceptOption, accept_of
from batchweave.remote.download import can_be_written, take
from batchweave.remote.follow import ENDED, SENTENCES, extras, refusal, report, sentence, warnings
from batchweave.remote.preview import figures, start
from batchweave.remote.session import LOCAL_URL, NO_KEY, KeyOption, UrlOption, named, service_at
from batchweave.remote.shapes import Batch
from batchweave.remote.submit import OutputOption, WaitOption, fetch, started, watch
from batchweave.terminal import JsonOption, duration, print_json, print_table, said

app = typer.Typer(no_args_is_help=True, help="List, watch, start, cancel and retry batches, and fetch their results.")
BatchId = Annotated[
    str, typer.Argument(help="Id printed by `batchweave submit`: batch_…", metavar="ID", callback=named)
]
LISTED = 20
NAME_SHOWN = 60  # characters


def _known(wanted: list[str] | None) -> list[str] | None:
    for status in wanted or []:
        if status not in SENTENCES:
            raise typer.BadParameter(f"must be one of {', '.join(SENTENCES)}, not {status!r}")
    return wanted


@app.command("list")
def list_batches(
    status: Annotated[
        list[str] | None,
        typer.Option("--status", callback=_known, help="Show only this status, such as in_progress; repeatable."),
    ] = None,
    count: Annotated[int, typer.Option("--count", min=1, max=100_000, help="Show at most this many batches.")] = LISTED,
    as_json: JsonOption = False,
    url: UrlOption = LOCAL_URL,
    key: KeyOption = NO_KEY,
) -> None:
    """List your batches, newest first. Example: `batchweave batches list --status in_progress --status validating`"""
    found: list[Batch] = []
    with service_at(url, key) as client:
        for batch in map(Batch.of, client.every("/batches")):
            if not status or batch.status in status:
                found.append(batch)
            if len(found) == count:
                break
        if as_json:
            print_json([batch.raw for batch in found])
            return
        names = ("id", "status", "model", "answered", "failed", "age", "next", "name")
        print_table(names, [_row(batch) for batch in found])


@app.command("show")
def show_batch(
    batch_id: BatchId, as_json: JsonOption = False, url: UrlOption = LOCAL_URL, key: KeyOption = NO_KEY
) -> None:
    """Show one batch: its progress, what it is waiting for, and what failed."""
    with service_at(url, key) as client:
        batch = Batch.of(client.get(f"/batches/{batch_id}"))
        if as_json:
            print_json(batch.raw)
            return
        _show(batch)


@app.command("wait")
def wait_for_batch(
    batch_id: BatchId,
    output: OutputOption = None,
    as_json: JsonOption = False,
    url: UrlOption = LOCAL_URL,
    key: KeyOption = NO_KEY,
) -> None:
    """Watch a batch until it finishes. Exit codes are those of `batchweave submit`."""
    with service_at(url, key) as client:
        batch, code = watch(client, batch_id, output)
        if as_json:
            print_json(batch.raw)
    raise typer.Exit(code)


@app.command("start")
def start_batch(
    batch_id: BatchId,
    wait: WaitOption = False,
    output: OutputOption = None,
    as_json: JsonOption = False,
    url: UrlOption = LOCAL_URL,
    key: KeyOption = NO_KEY,
) -> None:
    """Start a batch that `batchweave submit --preview` holds. Its completion window begins now."""
    with service_at(url, key) as client:
        batch = start(client, batch_id)
        code = started(client, batch, wait or output is not None, output, as_json)
    raise typer.Exit(code)


@app.command("cancel")
def cancel_batch(
    batch_id: BatchId, as_json: JsonOption = False, url: UrlOption = LOCAL_URL, key: KeyOption = NO_KEY
) -> None:
    """Cancel a batch within seconds. Requests already answered keep their results."""
    with service_at(url, key) as client:
        batch = Batch.of(client.post(f"/batches/{batch_id}/cancel"))
        if as_json:
            print_json(batch.raw)
            return
        said.print(
            f"{batch.id} {sentence(batch)}. To get its results: batchweave batches wait {batch.id} --output FILE"
        )


@app.command("delete")
def delete_batch(
    batch_id: BatchId, as_json: JsonOption = False, url: UrlOption = LOCAL_URL, key: KeyOption = NO_KEY
) -> None:
    """Delete a batch that has ended, and its result files, permanently. Its input file stays."""
    with service_at(url, key) as client:
        deleted = client.delete(f"/batches/{batch_id}")
        if as_json:
            print_json(deleted)
            return
        said.print(f"{batch_id} is deleted")


@app.command("retry")
def retry_batch(
    batch_id: BatchId,
    failed: Annotated[bool, typer.Option("--failed", help="Requests that failed or did not run; the default.")] = False,
    cut_off: Annotated[bool, typer.Option("--cut-off", help="Requests whose answer was cut off.")] = False,
    looped: Annotated[bool, typer.Option("--looped", help="Whose answer repeats itself until it is cut off.")] = False,
    invalid: Annotated[bool, typer.Option("--invalid", help="Whose answer is not the JSON asked for.")] = False,
    refused: Annotated[bool, typer.Option("--refused", help="Whose answer the model or a filter refused.")] = False,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, help="Limit for each answer, in place of its request's own.")
    ] = None,
    accept: AcceptOption = None,
    wait: WaitOption = False,
    output: OutputOption = None,
    as_json: JsonOption = False,
    url: UrlOption = LOCAL_URL,
    key: KeyOption = NO_KEY,
) -> None:
    """Rerun some requests of a finished batch as a new batch, and print its id.

    Examples:

    - `batchweave batches retry batch_… --wait`
    - `batchweave batches retry batch_… --cut-off --max-tokens 2000 --output longer.jsonl`
    """
    chosen = {"failed": failed, "cut_off": cut_off, "looped": looped}
    chosen |= {"invalid": invalid, "refused": refused}
    outcomes = [name for name, is_wanted in chosen.items() if is_wanted] or ["failed"]
    body: dict[str, Any] | None = None
    more = {"max_tokens": max_tokens, "accept": accept_of(accept)}
    if outcomes != ["failed"] or any(more.values()):  # an older service knows no others
        body = {"outcomes": outcomes} | {name: value for name, value in more.items() if value is not None}
    with service_at(url, key) as client:
        batch = Batch.of(client.post(f"/batches/{batch_id}/retry", body))
        if body and not extras(batch).get("retry_outcomes"):
            client.post(f"/batches/{batch.id}/cancel")
            raise CommandError(f"this service retries only what failed, so {batch.id} is cancelled. Upgrade it.")
        said.print(f"requests of {batch_id} run again as {batch.id}: {', '.join(outcomes).replace('_', ' ')}")
        code = started(client, batch, wait or output is not None, output, as_json)
    raise typer.Exit(code)


@app.command("results")
def batch_results(
    batch_id: BatchId,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", callback=can_be_written, help="File to write; default: standard output, without errors."
        ),
    ] = None,
    as_json: JsonOption = False,
    url: UrlOption = LOCAL_URL,
    key: KeyOption = NO_KEY,
) -> None:
    """Fetch a batch's results; while it is running, the results so far.

    Examples:

    - `batchweave batches results batch_… --output results.jsonl`
    - `batchweave batches results batch_… | jq .response.body.usage`
    """
    with service_at(url, key) as client:
        if as_json and output is None:
            raise CommandError(
                "--json says where files are, so it needs --output. Without both, results are JSON lines."
            )
        batch = Batch.of(client.get(f"/batches/{batch_id}"))
        if output is not None and batch.status in ENDED:
            found = fetch(client, batch, output)
            if as_json:
                print_json({"id": batch_id, "status": batch.status, **found})
            return
        so_far = None if batch.status in ENDED else extras(batch).get("early_output_file_id")
        file_id = batch.output_file_id or so_far
        if file_id is None:
            why = refusal(batch) or ("no successful request" if batch.status in ENDED else "no results yet")
            more = f"`batchweave batches show {batch_id}` says more"
            raise CommandError(f"{batch_id} {sentence(batch)}, {why}; {more}.")
        if output is not None:
            said.print(
                f"results so far: {output} ({take(client, file_id, output):,} bytes); the batch {sentence(batch)}"
            )
            if as_json:
                print_json({"id": batch_id, "status": batch.status, "results": str(output)})
            return
        with client.content(file_id) as answer:
            for piece in answer.iter_bytes():
                sys.stdout.buffer.write(piece)


def _answered(batch: Batch) -> tuple[str, str]:
    """Return how many requests are answered, such as 3 of 4, and how many failed or were not run."""
    counts = batch.request_counts
    if counts is None or not counts.total:
        return "", ""
    not_run = counts.not_run if _ended(batch) else 0
    told = [f"{counts.failed:,}" if counts.failed else "", f"{not_run:,} not run" if not_run else ""]
    return f"{counts.completed + counts.failed:,} of {counts.total:,}", ", ".join(each for each in told if each)


def _next(batch: Batch) -> str:
    """Return what a batch is waiting for and when it is expected to finish."""
    about = extras(batch)
    if batch.status in ENDED:
        return refusal(batch) or ""
    waits = f"waiting for {about['waiting_for']}" if about.get("waiting_for") else ""
    known = about.get("expected_at") and not about.get("held")
    ends = f"ends in {duration(about['expected_at'] - time.time())}" if known else ""
    late = f"too late because of {about['late_because']}" if about.get("late_because") else ""
    return ", ".join(each for each in (waits, ends, late) if each)


def _row(batch: Batch) -> tuple[str, ...]:
    age = duration(time.time() - batch.created_at)
    name = (batch.metadata or {}).get("name", "")[:NAME_SHOWN]  # as the dashboard names a batch
    return (batch.id, batch.status, batch.model or "", *_answered(batch), age, _next(batch), name)


def _show(batch: Batch) -> None:
    about = extras(batch)
    answered, failed = _answered(batch)
    rows = [
        ("status", batch.status),
        ("next", _next(batch)),
        ("endpoint", batch.endpoint),
        ("model", batch.model or ""),
        ("answered", answered),
        ("failed", failed),
        ("created", f"{duration(time.time() - batch.created_at)} ago"),
        (
            "deadline",
            f"in {duration(batch.expires_at - time.time())}" if batch.expires_at and not _ended(batch) else "",
        ),
        *figures(batch),
        ("input file", batch.input_file_id),
        ("output file", batch.output_file_id or (not _ended(batch) and about.get("early_output_file_id")) or ""),
        ("error file", batch.error_file_id or ""),
        ("metadata", " ".join(f"{name}={value}" for name, value in (batch.metadata or {}).items())),
    ]
    print_table((batch.id, ""), [row for row in rows if row[1]])
    for each in warnings(batch):
        said.print(each)
    if _ended(batch):
        report(batch)


def _ended(batch: Batch) -> bool:
    return batch.status in ENDED
