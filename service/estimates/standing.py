"""A batch's position, what it waits for, and its estimated end: what clients see under `batchweave`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from service.db.moves import TERMINAL
from service.db.tables import Batch, BatchStatus, SliceBatch, SliceStatus, fixed
from service.estimates.preview import Preview
from service.estimates.serving import Serving
from service.objects.storage import ANSWERS_RESERVE, Room
from service.queue.counts import Counts

STANDARD_ERRORS = 2.0
BUSY_SHARE = 0.5  # of the engines' time, from which a reason for waiting names online requests
LEAST_ANSWERS = 1.0  # after decay; fewer are too few to predict when others come


@dataclass(frozen=True, slots=True)
class Estimate:
    """When a batch ends, in Unix seconds.

    `earliest_at` uses the planner's cost model alone. The others use the recent pace of the model's answers:
    `expected_at` assumes that all work with an earlier deadline is done first, `latest_at` that all work that engines
    already hold is done first too.
    """

    earliest_at: int | None = None
    expected_at: int | None = None
    latest_at: int | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """The expected work of a whole batch, extrapolated from its plan or its preview, by the planner's cost model."""

    compute_s: float
    memory_s: float
    output_tokens: float

    @property
    def gpu_s(self) -> float:
        return max(self.compute_s, self.memory_s)


def work_of(batch: Batch) -> Work | None:
    if batch.planned:
        share = batch.total / batch.planned
        planned = (batch.planned_compute_s, batch.planned_memory_s, batch.planned_output_tokens)
        return Work(*(each * share for each in planned))
    found = Preview.of(batch)
    return Work(found.compute_s, found.memory_s, found.output_tokens) if found else None


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a batch stands.

    `is_timed`: whether the planner's cost model describes the machine of its model; `position`: batches of its model
    ahead of it; `waiting_for`: None while it runs and after it has ended. `late_because`: why it will miss its
    deadline, if only online requests make it late.
    """

    is_timed: bool
    position: int | None = None
    waiting_for: str | None = None
    estimate: Estimate = Estimate()
    late_because: str | None = None


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What batches stand in. `running`: ids of those of which a worker holds a slice; `timed`: `timed_models`."""

    serving: dict[str, Serving]
    running: set[str]
    timed: set[str]
    room: Room | None
    now: float


def standing(batch: Batch, counts: Counts, around: Surroundings) -> Standing:
    """Return the standing of a batch."""
    is_timed, room = batch.model in around.timed, around.room
    if batch.status in TERMINAL:
        return Standing(is_timed)
    is_waiting = batch.status == BatchStatus.VALIDATING
    if room is not None and room.free_bytes < room.reserve_bytes * (1.0 if is_waiting else ANSWERS_RESERVE):
        return Standing(
            is_timed, waiting_for=f"room on the service's disk: only {room.free_bytes // 2**20} MiB are free"
        )
    if is_waiting:
        return Standing(is_timed, waiting_for="validation")
    if batch.status != BatchStatus.IN_PROGRESS:
        return Standing(is_timed, waiting_for="its result files to be written")
    model = around.serving.get(batch.model or "", Serving())
    position, _ = model.queue.before(batch.expires_at, batch.seq)
    estimate = _estimate(batch, counts.answered, model, around.now)
    late = late_because(batch, estimate, model, around.now)
    waits = waiting_for(batch, batch.id in around.running, position, model)
    return Standing(is_timed, position, waits, estimate if is_timed else replace(estimate, earliest_at=None), late)


async def running(session: AsyncSession, batch_ids: Sequence[str]) -> set[str]:
    """Return those of these batches of which a worker holds a slice."""
    leased = SliceBatch.batch_id.in_(batch_ids) & (SliceBatch.status == fixed(SliceStatus.LEASED))
    return set(await session.scalars(select(SliceBatch.batch_id).where(leased).distinct())) if batch_ids else set()


def waiting_for(batch: Batch, running: bool, position: int, model: Serving) -> str | None:
    """Return what a batch in progress waits for; None if a worker runs it."""
    if batch.held:
        return "its start" if batch.preview else "the preview of its plan"
    if not batch.planned:
        return "planning"
    if not model.alive and model.starting_s is not None:
        return f"a worker that serves {batch.model}: it has been starting for {model.starting_s:.0f} s"
    if not model.alive:
        return f"a worker that serves {batch.model}: none is alive"
    if model.stalled == model.alive:
        return f"the engines that serve {batch.model}: none has finished a step for a while"
    if running:
        return None
    if model.draining == model.alive:
        return f"a worker that serves {batch.model}: all live workers are draining, until one is resumed"
    if position:
        return f"{position} {'batch' if position == 1 else 'batches'} before it"
    return f"room in an engine beside {_online(model)}" if model.online_share >= BUSY_SHARE else "room in an engine"


def late_because(batch: Batch, estimate: Estimate, model: Serving, now: float) -> str | None:
    """Return why a batch will miss its deadline, if it would meet it without online requests."""
    if batch.held or estimate.expected_at is None or estimate.expected_at <= batch.expires_at:
        return None
    alone_s = (estimate.expected_at - now) * (1.0 - model.online_share)
    return _online(model) if now + alone_s <= batch.expires_at else None


def _online(model: Serving) -> str:
    return f"online requests, which take {model.online_share:.0%} of the engines' time"


def _estimate(batch: Batch, answered: int, model: Serving, now: float) -> Estimate:
    work = work_of(batch)
    if not work or not model.alive:
        return Estimate()
    left_s = work.gpu_s * (batch.total - answered) / batch.total
    _, before_s = model.queue.before(batch.expires_at, batch.seq)
    earliest_at = math.ceil(now + (left_s + (0.0 if answered else before_s)) / model.alive)
    if not model.pace.work or model.pace.answers < LEAST_ANSWERS:
        return Estimate(earliest_at)
    beside_s = model.queue.leased_behind_s(batch.expires_at, batch.seq)
    expected_s = (left_s + before_s) / model.pace.work
    doubt = 1 + STANDARD_ERRORS / math.sqrt(max(1.0, min(model.pace.answers, batch.total - answered)))
    latest_s = (expected_s + beside_s / model.pace.work) * doubt
    return Estimate(earliest_at, math.ceil(now + expected_s), math.ceil(now + latest_s))
