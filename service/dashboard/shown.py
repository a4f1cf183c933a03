"""A batch as pages show it: its name, one word for its state, and what there is to say about it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from batchweave.terminal import duration
from service.api import batches
from service.api.context import Context
from service.api.shapes import BatchObject
from service.dashboard.standings import RUNS
from service.db.clock import DAY_S
from service.db.moves import LIVE
from service.db.tables import Batch, BatchStatus, File
from service.db.tenant_tables import Project
from service.estimates.outcomes import SHARE
from service.metrics.history import History
from service.requests.accept import Accept

NAME = "name"  # key of the metadata that names a batch
# The one word that all pages use for a state; `waiting`, `held` and `running` are parts of the API's in_progress.
WORDS = {
    "validating": "Checking",
    "waiting": "Waiting",
    "held": "Held",
    "running": "Running",
    "finalizing": "Writing results",
    "completed": "Completed",
    "failed": "Failed",
    "expired": "Expired",
    "cancelling": "Cancelling",
    "cancelled": "Cancelled",
}
# The words for outcomes of answers that are not ok.
BAD = {"cut_off": "cut off", "looped": "looped", "invalid": "not valid", "refused": "refused"}
TIGHT_S = 1800  # before the deadline, from which it is near in any case


@dataclass(frozen=True, slots=True)
class Shown:
    """A batch with what pages say about it.

    `state`: a key of WORDS. `project`: None if the viewer sees only one. `pace`: answer tokens per second over the last
    minute, None if nothing came.
    """

    batch: BatchObject
    name: str
    state: str
    project: str | None
    pace: float | None

    @property
    def word(self) -> str:
        return WORDS[self.state]

    @property
    def is_live(self) -> bool:
        return self.batch.status in LIVE

    @property
    def total(self) -> int:
        return self.batch.request_counts.total

    @property
    def not_run(self) -> int:
        """Return how many requests got no answer because the batch was cancelled or expired first."""
        return 0 if self.is_live else self.total - self.done

    @property
    def failed(self) -> int:
        return self.batch.request_counts.failed

    @property
    def done(self) -> int:
        return self.batch.request_counts.completed + self.failed

    @property
    def ended_at(self) -> int | None:
        batch = self.batch
        return batch.completed_at or batch.failed_at or batch.expired_at or batch.cancelled_at

    @property
    def colour(self) -> str:
        """Return the class of its colour: its state's, or `care` where many answers are not ok or requests failed."""
        is_bad = bool(self.batch.batchweave.outcome_warnings) or self.failed > SHARE * self.done
        return "care" if is_bad and self.state in ("running", "completed") else self.state

    @property
    def lists(self) -> list[tuple[str, int, str]]:
        """Return the lists of requests that are worth a look: kind, length and word of each that has some."""
        found = self.batch.batchweave.outcomes
        kinds = [(name, getattr(found, name), word) for name, word in BAD.items()] + [("failed", self.failed, "failed")]
        return [each for each in kinds if each[1]]

    @property
    def accepts(self) -> str:
        """Return which answers the batch takes, and what it does about others; empty if it takes all."""
        found = Accept.of(self.batch.batchweave.accept)
        parts = {
            "the whole JSON that was asked for": found.schema,
            "not cut off, looped or refused": found.finish,
            f"{found.retries} {'retry' if found.retries == 1 else 'retries'}": found.retries,
            "tries are told what was wrong": found.explain,
            f"{found.more:,} more tokens": found.more,
            "loops are stopped": found.loops,
            f"thoughts of {found.thinking_tokens or 0:,} tokens": found.thinking_tokens is not None,
        }
        return "; ".join(words for words, is_said in parts.items() if is_said)

    @property
    def _bad(self) -> str:
        """Return how many answers are not ok, as a part of a sentence."""
        said = [f"{count:,} {word}" for kind, count, word in self.lists if kind in BAD]
        return f" ({', '.join(said)})" if said else ""

    def headline(self, now: float) -> str:
        """Return where the batch stands, in one sentence without a full stop."""
        about, answered = self.batch.batchweave, f"{self.done:,} of {self.total:,}"
        match self.state:
            case "validating":
                return "Checking the file before anything runs"
            case "held":
                return "Held: it runs once you start it"
            case "waiting":
                what = f"Waiting for {about.waiting_for}" if about.waiting_for else "Waiting"
                return what + (f", {answered} answered" if self.done else "") + self._end(now)
            case "running":
                return f"Running, {answered}{self._bad}{self._end(now)}"
            case "finalizing":
                return f"Writing the result files, {answered} answered"
            case "completed":
                took = duration((self.ended_at or now) - self.batch.created_at)
                not_accepted = self.batch.batchweave.outcomes.not_accepted
                of_these = f" ({not_accepted:,} not accepted)" if not_accepted else ""
                failed = f", {self.failed:,} failed{of_these}" if self.failed else ""
                answers = self.batch.request_counts.completed
                return f"Completed in {took}: {answers:,} {'answer' if answers == 1 else 'answers'}{self._bad}{failed}"
            case "failed":
                errors = self.batch.errors.data if self.batch.errors else []
                if [error.code for error in errors] == ["model_not_served"]:  # the file may be right
                    return "Failed: no worker serves its model, and nothing ran"
                count = len(errors)
                return f"Failed: the file has {count:,} {'error' if count == 1 else 'errors'}, and nothing ran"
            case "cancelling":
                return f"Cancelling, {answered} answered"
            case _:
                return f"{self.word} with {answered} answered"

    def _end(self, now: float) -> str:
        at = self.batch.batchweave.expected_at
        return "" if at is None else f", done about {clock_time(at, now)}"

    def slack(self, now: float) -> tuple[str, float] | None:
        """Return how it stands against its deadline (good, tight or late) and the seconds left; None if unknown."""
        batch = self.batch
        if batch.status not in ("validating", "in_progress") or batch.batchweave.held or not batch.expires_at:
            return None
        left = batch.expires_at - now
        expected = (batch.batchweave.expected_at or batch.batchweave.earliest_at or now) - now
        return ("late" if left < expected else "tight" if left < max(2 * expected, TIGHT_S) else "good"), left


def clock_time(at: float, now: float) -> str:
    """Format a time near `now` in UTC: "22:19 UTC", or "27 Nov 22:19 UTC" on another day."""
    is_today = int(at) // DAY_S == int(now) // DAY_S
    return time.strftime("%H:%M UTC" if is_today else "%-d %b %H:%M UTC", time.gmtime(at))


async def shown(context: Context, rows: Sequence[Batch], projects: dict[str, str]) -> list[Shown]:
    """Return these batches as pages show them. `projects`: names by ID, empty if the viewer sees only one."""
    async with context.database.read() as session:
        names, running = await _names(session, rows), await _running(session, rows)
    paces = await History(context.redis).paces([row.id for row in rows if row.status in LIVE], context.clock())
    found = list[Shown]()
    for row, batch in zip(rows, await batches.shapes(context, rows), strict=True):
        name = (row.custom_metadata or {}).get(NAME) or names.get(row.input_file_id) or row.id
        # Leases of a worker that died stand for a while: what waits for a worker does not run.
        state = _state(row, row.id in running and not batch.batchweave.waiting_for)
        found.append(Shown(batch, name, state, projects.get(row.project_id), paces.get(row.id)))
    return found


async def project_names(session: AsyncSession) -> dict[str, str]:
    """Return the names of all projects by ID, sorted by name."""
    return {key: name for key, name in await session.execute(select(Project.id, Project.name).order_by(Project.name))}


async def _names(session: AsyncSession, rows: Sequence[Batch]) -> dict[str, str]:
    """Return the names of the batches' input files, by the file's ID; deleted files have theirs too."""
    wanted = select(File.id, File.filename).where(File.id.in_({row.input_file_id for row in rows}))
    return {file_id: name for file_id, name in await session.execute(wanted)}


async def _running(session: AsyncSession, rows: Sequence[Batch]) -> set[str]:
    live = [row.id for row in rows if row.status == BatchStatus.IN_PROGRESS]
    return set(await session.scalars(select(Batch.id).where(Batch.id.in_(live), RUNS))) if live else set()


def _state(row: Batch, is_running: bool) -> str:
    if row.status != BatchStatus.IN_PROGRESS:
        return "held" if row.held and row.status in LIVE else str(row.status)
    return "held" if row.held else "running" if is_running else "waiting"
