"""Runs requests again whose answers were lost with their storage, or of which nobody knows who should have run them."""

from collections.abc import Callable
from dataclasses import asdict

import numpy as np
import structlog
from numpy.typing import NDArray
from sqlalchemy import literal

from service import ids
from service.db.moves import move_batch
from service.db.sessions import Database
from service.db.tables import Batch, BatchStatus, Slice, SliceBatch, Window
from service.objects.plan_artifact import PLACE, PlanArtifact, PlanHeader
from service.objects.storage import Storage
from service.queue.counts import Counts
from service.queue.urgency import urgent_at

MOST = 100_000  # requests in one round; the batch comes back for the others
SLICE_REQUESTS = 256
log = structlog.get_logger()


class EndedElsewhere(Exception):
    """Another finalizer ended the batch, or lets its requests run again."""


async def run_again(
    database: Database,
    storage: Storage,
    batch: Batch,
    missing: NDArray[np.int64],
    counts: Counts,
    clock: Callable[[], float],
) -> bool:
    """Make slices of the `missing` requests of a batch that is finalizing, and let it run; return whether it does.

    `counts`: what was found of the others. A planner may take the new slices back and plan them with other requests.
    """
    numbers, now = missing[:MOST], clock()
    order = np.zeros(len(numbers), dtype=PLACE)
    order["request"] = numbers
    pieces = [(first, min(SLICE_REQUESTS, len(order) - first)) for first in range(0, len(order), SLICE_REQUESTS)]
    model = batch.model or ""
    header = PlanHeader(
        model=model,
        batches=[batch.id],
        requests=len(order),
        prompt_tokens=0,
        sharing=0.0,
        sharing_kept=0.0,
        density=None,
        compute_s=0.0,
        memory_s=0.0,
        planned_for="",
        slices=pieces,
        created_at=int(now),
    )
    artifact = PlanArtifact(storage, ids.plan_id())
    await artifact.write(header, order)
    try:
        async with database.write() as session:
            window = Window(model=model, plan_id=artifact.plan_id, created_at=int(now))
            session.add(window)
            await session.flush()
            slices = [Slice(window_id=window.id, model=model, first=first, count=count) for first, count in pieces]
            session.add_all(slices)
            await session.flush()
            session.add_all(SliceBatch(slice_id=each.id, batch_id=batch.id, total=each.count) for each in slices)
            moved = await move_batch(
                session,
                batch.id,
                BatchStatus.IN_PROGRESS,
                now=now,
                only_if=Batch.status == BatchStatus.FINALIZING,
                in_progress_at=batch.in_progress_at,
                finalizing_at=None,
                slices=Batch.slices + len(slices),
                slices_left=Batch.slices_left + len(slices),
                urgent_at=urgent_at(literal(len(numbers))),
                **asdict(counts),
            )
            if not moved:
                raise EndedElsewhere(batch.id)
    except EndedElsewhere:
        await artifact.delete()
        return False
    log.error("answers were lost and run again", batch=batch.id, requests=len(numbers), of=len(missing))
    return True
