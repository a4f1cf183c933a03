"""Shows the expected time and cost of a held batch, and starts it."""

import sys
import time

import typer

from batchweave.remote.client import Client
from batchweave.remote.follow import ENDED, extras, follow
from batchweave.remote.shapes import Batch
from batchweave.terminal import duration, interrupted, said


def can_ask() -> bool:
    """Return whether the command can ask the user at a terminal."""
    return sys.stdin.isatty() and said.is_terminal


def start(client: Client, batch_id: str) -> Batch:
    batch = Batch.of(client.post(f"/batches/{batch_id}/start"))
    said.print(f"{batch_id} is started")
    return batch


def preview(client: Client, batch_id: str) -> tuple[Batch, bool]:
    """Show the expected time and cost of a held batch, and ask at a terminal whether to start it.

    Returns the batch, and whether it was started.
    """
    batch = follow(client, batch_id, lambda each: extras(each).get("preview") is not None)
    if batch.status in ENDED:
        return batch, False
    for name, value in figures(batch):
        said.print(f"{name:24}{value}")
    held = f"Held. To start it: batchweave batches start {batch_id}; to cancel it: batchweave batches cancel {batch_id}"
    try:
        if can_ask() and typer.confirm("Start the batch?", err=True):
            return start(client, batch_id), True
    except typer.Abort:  # Ctrl-C, Ctrl-D
        interrupted(f"\n{held}")
    said.print(held)
    return batch, False


def figures(batch: Batch) -> list[tuple[str, str]]:
    """Return the expected figures of a batch as labels and values; empty before it is planned."""
    about = extras(batch)
    plan, seconds, rows = about.get("preview"), about.get("expected_gpu_seconds"), list[tuple[str, str]]()
    if about.get("expected_output_tokens") is None:
        return []
    if about.get("expected_at") is not None:
        ends = (about["expected_at"], about.get("latest_at") or about["expected_at"])
        first, last = (duration(at - time.time()) for at in ends)
        rows.append(("estimated end in", f"{first}, at most about {last}, at the pace of this model's answers"))
    elif seconds is None:
        rows.append(("estimated end in", "unknown until a worker of this model has answered: its pace tells"))
    if about.get("earliest_at") is not None:
        rows.append(("earliest end in", duration(about["earliest_at"] - time.time())))
    if seconds is not None:
        on = f" for {plan['planned_for']}" if plan else ""
        rows.append(("expected engine time", f"{duration(seconds)}, the cost model's lower bound{on}"))
    if about.get("expected_cost") is not None:
        rows.append(("expected cost", f"{about['expected_cost']:,.4g}"))
    rows.append(("prompt tokens", f"{about['prompt_tokens']:,}{_shared(plan)}"))
    rows.append(("expected output tokens", f"{about['expected_output_tokens']:,}"))
    return rows


def _shared(plan: dict[str, float] | None) -> str:
    return f", {plan['prompt_sharing']:.0%} of them shared" if plan else ""
