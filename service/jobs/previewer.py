"""The previewer: plans a batch that is held, by itself, so that its owner sees time and cost before it starts."""

import asyncio
from collections.abc import Callable

import structlog
from sqlalchemy import select, update

from engine_ext.plan.window import Shape, plan_window
from service import tracing
from service.db.sessions import Database
from service.db.tables import Batch, BatchStatus
from service.jobs.costs import Costs
from service.jobs.desk import Desk
from service.jobs.fair_window import Span
from service.jobs.gather import gather
from service.preview import Preview
from service.settings import Settings
from service.storage import Storage

log = structlog.get_logger()


class Previewer:
    def __init__(self, database: Database, storage: Storage, settings: Settings, clock: Callable[[], float]) -> None:
        self._database = database
        self._storage = storage
        self._settings = settings
        self._clock = clock
        self._desk = Desk("previewer", clock)
        self._costs = Costs(database, settings)

    async def run_once(self) -> bool:
        """Plan one batch that is held and has no preview yet; whether there was one."""
        waits = (Batch.status == BatchStatus.IN_PROGRESS) & Batch.held & Batch.preview.is_(None)
        async with self._database.read() as session:
            held = (await session.scalars(select(Batch).where(waits).order_by(Batch.seq))).all()
        by_id = {batch.id: batch for batch in held}
        async with self._desk.take(by_id) as batch_id:
            if batch_id is not None:
                with tracing.stage("preview", [batch_id]):
                    await self._preview(by_id[batch_id])
        return batch_id is not None

    async def _preview(self, batch: Batch) -> None:
        """A batch larger than a window is judged by its first requests, as many as a window has."""
        count = min(batch.total, self._settings.window_requests)
        span = Span(batch.id, batch.project_id, 1.0, batch.index_id or "", 0, count, batch.expires_at)
        found = await gather(self._storage, self._settings, [span])
        cost = await self._costs.of(batch.model or "")
        shape = Shape(slice_requests=self._settings.slice_requests)
        wishes = found.wishes(self._clock())
        plan = await asyncio.to_thread(plan_window, found.prompts, found.outputs, cost, wishes, shape)
        seen = len(found.places)
        share = batch.total / seen
        preview = Preview(
            requests=seen,
            output_tokens=round(float(plan.estimates.mean.sum()) * share),
            prompt_sharing=plan.sharing,
            compute_s=float(plan.compute_s.sum()) * share,
            memory_s=float(plan.memory_s.sum()) * share,
            planned_for=cost.name,
        )
        async with self._database.write() as session:
            await session.execute(update(Batch).where(Batch.id == batch.id).values(preview=preview.row))
        log.info("previewed", batch=batch.id, requests=seen, of=batch.total)
