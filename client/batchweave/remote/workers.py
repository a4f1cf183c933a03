"""`batchweave workers …`: list, drain and resume workers, with a key whose role is monitor or operator."""

import time
from typing import Annotated, Any
from urllib.parse import quote

import typer

from batchweave.errors import CommandError
from batchweave.remote.session import LOCAL_URL, NO_KEY, KeyOption, UrlOption, service_at
from batchweave.terminal import JsonOption, duration, print_json, print_table, said

app = typer.Typer(no_args_is_help=True, help="List workers, drain them and resume them.")
Name = Annotated[str, typer.Argument(help="Name from `batchweave workers list`.")]


@app.command("list")
def list_workers(as_json: JsonOption = False, url: UrlOption = LOCAL_URL, key: KeyOption = NO_KEY) -> None:
    """List the workers that are alive."""
    with service_at(url, key) as client:
        found: Any = client.get("/workers")
        if not isinstance(found, dict) or "data" not in found:
            raise CommandError(f"{url} lists no workers: is this a batchweave service?")
        if as_json:
            print_json(found["data"])
            return
        names = ("name", "state", "model", "host", "machine", "slices", "requests", "steps/s", "tokens/s", "seen")
        print_table(names, [_row(each) for each in found["data"]])
    if not found["data"]:
        said.print("No worker is alive. Start one with `batchweave worker`, or everything with `batchweave up`.")


@app.command("drain")
def drain_worker(name: Name, as_json: JsonOption = False, url: UrlOption = LOCAL_URL, key: KeyOption = NO_KEY) -> None:
    """Drain a worker: it finishes its slices and takes no new ones, even after a restart under the same name."""
    with service_at(url, key) as client:
        found: Any = client.post(f"/workers/{quote(name, safe='')}/drain")
        if as_json:
            print_json(found)
            return
        where = f" Its process is {found['pid']} on {found['host']}." if found.get("pid") else ""
        undo = f"To undo: batchweave workers resume {name}"
        said.print(f"{name} is draining: {found['slices']} slices left.{where} {undo}")


@app.command("resume")
def resume_worker(name: Name, as_json: JsonOption = False, url: UrlOption = LOCAL_URL, key: KeyOption = NO_KEY) -> None:
    """Resume a drained worker: it takes slices again."""
    with service_at(url, key) as client:
        found: Any = client.post(f"/workers/{quote(name, safe='')}/resume")
        if as_json:
            print_json(found)
            return
        said.print(f"{name} takes slices again")


def _row(worker: dict[str, Any]) -> tuple[str, ...]:
    rates = [
        "" if worker[name] is None else f"{worker[name]:,.1f}" for name in ("steps_per_second", "tokens_per_second")
    ]
    counts = (str(worker["slices"]), f"{worker['requests']:,}")
    seen = f"{duration(time.time() - worker['seen_at'])} ago"
    state = worker["state"]
    if worker.get("starting_s") is not None:
        state = f"starting, {duration(worker['starting_s'])}"
    elif state == "stalled":
        state = f"stalled, {duration(worker['step_age_s'])}"
    return (
        worker["id"],
        state,
        worker["model"],
        " ".join([worker["host"], *worker.get("followers", [])]),
        worker["machine"],
        *counts,
        *rates,
        seen,
    )
