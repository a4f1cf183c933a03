"""The previewer: plans each held batch on its own, so that its owner sees its time and cost before it starts."""

from collections.abc import Callable, Sequence

import structlog
from sqlalchemy import select, update

from service.db.sessions import Database
from service.db.tables import Batch, BatchStatus
from service.estimates.preview import Preview
from service.jobs.costs import Costs
from service.jobs.fair_turns import FairDesk
from service.jobs.fair_window import Span
from service.jobs.gather import gather, plan_of
from service.metrics import tracing
from service.objects.request_index import IndexGone, forget_index
from service.objects.storage import Storage
from service.settings import Settings

log = structlog.get_logger()

_WAITS = (Batch.status == BatchStatus.IN_PROGRESS) & Batch.held & Batch.preview.is_(None) & Batch.index_id.is_not(None)


class Previewer:
    """Writes the previews of held batches."""

    def __init__(self, database: Database, storage: Storage, settings: Settings, clock: Callable[[], float]) -> None:
        self._database = database
        self._storage = storage
        self._settings = settings
        self._clock = clock
        self._desk = FairDesk("previewer", database, clock)
        self._costs = Costs(database, settings)

    async def run_once(self) -> bool:
        """Preview one held batch that lacks a preview. Returns whether it found one. Projects take turns by weight."""
        async with self._desk.take(_WAITS, self._first) as taken:
            if taken is not None:
                with tracing.stage("preview", [taken.batch_id]):
                    taken.work += await self._preview(taken.batch_id)
        return taken is not None

    async def _first(self, project_id: str) -> Sequence[str]:
        mine = select(Batch.id).where(Batch.project_id == project_id, _WAITS)
        async with self._database.read() as session:
            return (await session.scalars(mine.order_by(Batch.seq).limit(self._desk.enough))).all()

    async def _preview(self, batch_id: str) -> int:
        """Plan the batch by itself and store its preview. Returns how many requests it planned.

        For a batch larger than a window, it plans one window of its first requests and scales the figures up.
        """
        async with self._database.read() as session:
            batch = (await session.scalars(select(Batch).where(Batch.id == batch_id))).one()
        count = min(batch.total, self._settings.window_requests)
        span = Span(batch.id, batch.project_id, 1.0, batch.index_id or "", 0, count, batch.expires_at)
        try:
            found = await gather(self._database, self._storage, self._settings, [span])
        except IndexGone as gone:
            await forget_index(self._database, gone, self._clock())
            raise
        cost = await self._costs.of(batch.model or "")
        plan = await plan_of(found, cost, self._clock(), self._settings.slice_requests, self._settings.shared_cache)
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
        return seen
