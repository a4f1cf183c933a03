"""Watches a batch until it finishes, through disconnects and restarts of the service."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from batchweave.remote.client import AnswerError, Away, Client
from batchweave.remote.progress_lines import ProgressLines
from batchweave.remote.session import Exit
from batchweave.remote.shapes import Batch
from batchweave.terminal import duration, said

ENDED = ("completed", "failed", "expired", "cancelled")
# What a batch did, or does, by its status.
SENTENCES = {
    "validating": "is being validated",
    "in_progress": "is in progress",
    "finalizing": "is writing its files",
    "cancelling": "is being cancelled",
    "completed": "completed",
    "failed": "failed",
    "expired": "expired",
    "cancelled": "was cancelled",
}
AWAY = "the service is not responding; the batch continues"
FIRST_POLL_S, LAST_POLL_S = 0.5, 5.0
ONCE_S = 30.0  # for which one look may take, while others follow


@dataclass(slots=True)
class TokenRate:
    """Tracks tokens per second, input and output together, over about the last minute."""

    at: float = 0.0
    tokens: int = 0
    rate: float | None = None

    def see(self, tokens: int, now: float) -> None:
        if self.at and now > self.at and tokens >= self.tokens:
            newest = (tokens - self.tokens) / (now - self.at)
            weight = min(1.0, (now - self.at) / 20.0)
            self.rate = newest if self.rate is None else (1 - weight) * self.rate + weight * newest
        self.at, self.tokens = now, tokens


def extras(batch: Batch) -> dict[str, Any]:
    """Return the fields that a batch has beyond OpenAI's; empty for another service."""
    return batch.batchweave or {}


def follow(
    client: Client,
    batch_id: str,
    until: Callable[[Batch], bool] = lambda _: False,
    is_warned: bool = False,
    at_each: Callable[[Batch], None] = lambda _: None,
) -> Batch:
    """Show a batch's progress until it finishes or `until` holds, as a bar or, without a terminal, as lines.

    `is_warned`: its warnings have been printed before. `at_each`: called at each look with what was last known.
    After the first reply it takes it that the service comes back: that it restarts, or the network is cut.
    """
    batch = Batch.of(client.get(f"/batches/{batch_id}"))
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[more]}", markup=False),
    )
    pace, lines, pause_s, is_away = TokenRate(), ProgressLines(), FIRST_POLL_S, False
    with Progress(*columns, console=said, transient=True) as bar:
        task, told = bar.add_task("waiting", total=None, more=""), 0
        while batch.status not in ENDED and not until(batch):
            is_warned = _warn(batch, is_warned)
            told = _warn_of_outcomes(batch, told)
            counts = batch.request_counts
            if counts is not None:
                bar.update(task, total=counts.total or None, completed=counts.completed + counts.failed)
            pace.see(batch.usage.total_tokens if batch.usage else 0, time.monotonic())
            state, more = (AWAY, "") if is_away else (_state(batch), _more(batch, pace))
            bar.update(task, description=state, more=more)
            far = "" if is_away else ", ".join(each for each in (_done(batch), more) if each)
            lines.tell(state, far, time.monotonic())
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.1, LAST_POLL_S)
            at_each(batch)
            try:
                with client.trying_once(ONCE_S):
                    batch, is_away = Batch.of(client.get(f"/batches/{batch_id}")), False
            except (AnswerError, Away) as error:
                if isinstance(error, AnswerError) and not error.may_pass:
                    raise
                is_away = True
    _warn(batch, is_warned)
    return batch


def _warn(batch: Batch, is_warned: bool) -> bool:
    """Print the batch's warnings once they are known; return whether they have been printed."""
    found = [] if is_warned else warnings(batch)
    for each in found:
        said.print(each)
    return is_warned or bool(found)


def _warn_of_outcomes(batch: Batch, told: int) -> int:
    """Print how many answers are not ok, once for each outcome; return how many outcomes have been told."""
    found = extras(batch).get("outcome_warnings") or []
    for each in found if len(found) > told else []:
        said.print(f"warning so far: {each}", style="yellow")
    return max(told, len(found))


def warnings(batch: Batch) -> list[str]:
    """Return a sentence for each parameter of the batch's requests that is ignored."""
    found: list[str] = []
    for each in extras(batch).get("unknown_fields") or []:
        meant = f" Is '{each['similar']}' meant?" if each["similar"] else ""
        found.append(f"warning: the field '{each['name']}' of the create was ignored.{meant}")
    for each in extras(batch).get("unknown_parameters") or []:
        lines = f"{each['lines']:,} {'line' if each['lines'] == 1 else 'lines'}"
        meant = f" Is '{each['similar']}' meant?" if each["similar"] else ""
        if why := each.get("why"):
            found.append(f"warning: '{each['name']}' of {lines} does not do what it says: {why}.")
        else:
            found.append(
                f"warning: no engine knows the parameter '{each['name']}' of {lines}, so it is ignored.{meant}"
            )
    return found


def _state(batch: Batch) -> str:
    waiting_for = extras(batch).get("waiting_for")
    return f"waiting for {waiting_for}" if waiting_for else sentence(batch)


def _done(batch: Batch) -> str:
    counts = batch.request_counts
    if counts is None or not counts.total or extras(batch).get("waiting_for"):
        return ""
    return f"{counts.completed + counts.failed:,} of {counts.total:,} done"


def _more(batch: Batch, pace: TokenRate) -> str:
    counts, expected_at = batch.request_counts, extras(batch).get("expected_at")
    parts = [f"{counts.failed:,} failed"] if counts and counts.failed else []
    if pace.rate:
        parts.append(f"{pace.rate:,.0f} tokens/s")
    if expected_at:
        parts.append(f"{duration(expected_at - time.time())} left")
    return ", ".join(parts)


def sentence(batch: Batch) -> str:
    """Return what the batch does or did, as in "batch_1 was cancelled"."""
    return SENTENCES.get(batch.status, f"is {batch.status}")


NOT_RUN = ("batch_expired", "batch_cancelled")  # codes of requests that the end of a batch left


def refusal(batch: Batch) -> str | None:
    """Return what to do about a batch that was refused before anything ran; None for any other."""
    errors = (batch.errors.data if batch.errors else None) or []
    if batch.status != "failed" or not errors:
        return None
    if [error.code for error in errors] == ["model_not_served"]:  # the file may be right
        return "no worker serves its model, and nothing ran"
    count = f"{len(errors):,} {'error' if len(errors) == 1 else 'errors'}"
    return f"its file has {count}, and nothing ran. Correct the file and submit it again"


def report(batch: Batch) -> Exit:
    """Print how a batch ended, and return the exit code that says so to programs."""
    counts = batch.request_counts
    if counts is not None:
        took = (batch.completed_at or batch.cancelled_at or batch.expired_at or batch.failed_at or 0) - batch.created_at
        how = f"{counts.completed:,} of {counts.total:,} answered, {counts.failed:,} failed"
        how += f", {counts.not_run:,} not run" if counts.not_run else ""
        said.print(f"{batch.id} {sentence(batch)} after {duration(took)}: {refusal(batch) or how}")
    if batch.usage is not None and batch.usage.total_tokens:
        usage = batch.usage
        said.print(
            f"tokens: {usage.input_tokens:,} in ({usage.input_tokens_details.cached_tokens:,} from the cache), "
            f"{usage.output_tokens:,} out"
        )
    for error in (batch.errors.data if batch.errors else None) or []:
        where = "the file" if error.line is None else f"line {error.line}"
        said.print(f"{where}: {error.message} ({error.code})", style="red")
    for cause in extras(batch).get("failures") or []:
        names = ", ".join(cause["custom_ids"])
        how = "not run" if cause["code"] in NOT_RUN else "failed"
        said.print(f"{cause['count']:,} {how}: {cause['message']} (for example {names})", style="red")
    for each in extras(batch).get("outcome_warnings") or []:
        said.print(f"warning: {each}", style="yellow")
    if batch.status != "completed":
        return Exit.NOT_COMPLETED
    return Exit.SOME_FAILED if counts is not None and counts.failed else Exit.DONE
