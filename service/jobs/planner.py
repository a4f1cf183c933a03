"""The planner: gathers a model's waiting requests into a window, plans it, and commits its slices in a transaction."""

import asyncio
from collections.abc import Callable

import numpy as np
import structlog
from sqlalchemy import func, select, update

from engine_ext.plan.window import WindowPlan
from service import ids
from service.db.moves import rows_changed
from service.db.sessions import Database
from service.db.tables import Batch, BatchStatus, Project, Slice, SliceBatch, Window, fixed
from service.jobs.costs import Costs
from service.jobs.desk import Desk
from service.jobs.fair_window import Span, fill
from service.jobs.gather import gather, plan_of
from service.metrics import tracing
from service.objects.plan_artifact import Places, PlanArtifact, PlanHeader
from service.objects.plan_picture import picture_of
from service.objects.storage import Storage
from service.queue.urgency import urgent_at
from service.settings import Settings

LOGGED = 64  # batches named in one log line
MOST_BATCHES = 1000  # of a project in one window
log = structlog.get_logger()


class PlanOutdated(Exception):
    """A batch of the window was cancelled or planned by another process, so the window is not committed."""


def _expected(plan: WindowPlan, order: Places, spans: int) -> list[list[float]]:
    """Return the compute seconds, memory seconds and output tokens that the plan expects of each span.

    `order`: the places of the requests, in the plan's order.
    """
    batch = order["batch"]
    columns = (plan.compute_s, plan.memory_s, plan.estimates.mean)
    sums = [np.bincount(batch, weights=each[plan.order], minlength=spans) for each in columns]
    return np.stack(sums, axis=1).tolist()


class Planner:
    """Plans windows of waiting requests, one model at a time."""

    def __init__(self, database: Database, storage: Storage, settings: Settings, clock: Callable[[], float]) -> None:
        self._database = database
        self._storage = storage
        self._settings = settings
        self._clock = clock
        self._desk = Desk("planner", clock)
        self._costs = Costs(database, settings)

    async def run_once(self) -> bool:
        """Plan one window for a model with pending requests. Returns whether it found one."""
        pending = await self._pending()
        async with self._desk.take(pending) as model:
            if model is not None:
                with tracing.stage("plan", (span.batch_id for span in pending[model]), model=model):
                    try:
                        await self.plan(model, pending[model])
                    except PlanOutdated as error:
                        log.info("plan abandoned", model=model, reason=str(error))
        return model is not None

    async def _pending(self) -> dict[str, list[Span]]:
        """Return the unplanned requests by model, earliest deadline first, at most one window of each.

        It looks at MOST_BATCHES batches of a project at most; the others come with a later window.
        """
        place = func.row_number().over(
            partition_by=(Batch.model, Batch.project_id), order_by=(Batch.expires_at, Batch.seq)
        )
        unplanned = (Batch.status == fixed(BatchStatus.IN_PROGRESS)) & (Batch.planned < Batch.total)
        left = Batch.total - Batch.planned
        columns = (Batch.id, Batch.model, Batch.project_id, Batch.index_id, Batch.planned, Batch.expires_at, Batch.seq)
        first = select(*columns, left.label("left"), place.label("place")).where(unplanned, ~Batch.held).subquery()
        query = (
            select(first, Project.weight)
            .join(Project, Project.id == first.c.project_id)
            .where(first.c.place <= MOST_BATCHES)
            .order_by(first.c.expires_at, first.c.seq)
        )
        async with self._database.read() as session:
            rows = (await session.execute(query)).all()
        waiting: dict[str, list[Span]] = {}
        for row in rows:
            span = Span(row.id, row.project_id, row.weight, row.index_id or "", row.planned, row.left, row.expires_at)
            waiting.setdefault(row.model or "", []).append(span)
        return {model: fill(spans, self._settings.window_requests) for model, spans in waiting.items()}

    async def plan(self, model: str, wanted: list[Span]) -> None:
        """Plan these requests, or as many as fit into a window's tokens, and commit. Raises PlanOutdated."""
        found = await gather(self._database, self._storage, self._settings, wanted)
        cost = await self._costs.of(model)
        now = self._clock()
        plan = await plan_of(found, cost, now, self._settings)
        artifact = PlanArtifact(self._storage, ids.plan_id())
        header = PlanHeader(
            model=model,
            batches=[span.batch_id for span in found.spans],
            requests=len(found.places),
            prompt_tokens=plan.prompt_tokens,
            sharing=plan.load.sharing,
            sharing_kept=plan.sharing_kept,
            density=plan.load.density if np.isfinite(plan.load.density) else None,
            compute_s=plan.load.compute_s,
            memory_s=plan.load.memory_s,
            planned_for=cost.name,
            slices=[(each.first, each.count) for each in plan.slices],
            created_at=int(now),
        )
        order = found.places[plan.order]
        await artifact.write(header, order, await asyncio.to_thread(picture_of, plan))
        try:
            await self._commit(model, found.spans, artifact.plan_id, plan, order, int(now))
        except PlanOutdated:
            # Only this error makes it certain that nothing was committed; after any other, the sweeper decides.
            await artifact.delete()
            raise
        log.info(
            "planned",
            model=model,
            batches=header.batches[:LOGGED],
            requests=len(found.places),
            slices=len(plan.slices),
            prompt_tokens=plan.prompt_tokens,
            sharing=round(plan.load.sharing, 4),
            sharing_kept=round(plan.sharing_kept, 4),
            density=round(plan.load.density, 4),
        )

    async def _commit(
        self, model: str, spans: list[Span], plan_id: str, plan: WindowPlan, order: Places, now: int
    ) -> None:
        async with self._database.write() as session:
            for span, (compute_s, memory_s, tokens) in zip(spans, _expected(plan, order, len(spans)), strict=True):
                result = await session.execute(
                    update(Batch)
                    .where(
                        Batch.id == span.batch_id,
                        Batch.status == BatchStatus.IN_PROGRESS,
                        Batch.planned == span.first,
                    )
                    .values(
                        planned=span.first + span.count,
                        planned_compute_s=Batch.planned_compute_s + compute_s,
                        planned_memory_s=Batch.planned_memory_s + memory_s,
                        planned_output_tokens=Batch.planned_output_tokens + tokens,
                    )
                )
                if rows_changed(result) != 1:
                    raise PlanOutdated(f"{span.batch_id} has changed")
            window = Window(model=model, plan_id=plan_id, created_at=now)
            session.add(window)
            await session.flush()
            slices = [
                Slice(window_id=window.id, model=model, first=each.first, count=each.count) for each in plan.slices
            ]
            session.add_all(slices)
            await session.flush()
            parts = [0] * len(spans)
            for each in slices:
                members, counts = np.unique(order["batch"][each.first : each.first + each.count], return_counts=True)
                for member, count in zip(members.tolist(), counts.tolist(), strict=True):
                    session.add(SliceBatch(slice_id=each.id, batch_id=spans[member].batch_id, total=count))
                    parts[member] += 1
            rest = Batch.planned - Batch.completed - Batch.failed
            for span, count in zip(spans, parts, strict=True):
                told = {"slices": Batch.slices + count, "slices_left": Batch.slices_left + count}
                await session.execute(
                    update(Batch).where(Batch.id == span.batch_id).values(**told, urgent_at=urgent_at(rest))
                )
