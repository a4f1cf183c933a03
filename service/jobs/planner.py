"""The planner: gathers a model's waiting requests into a window, plans it, and commits its slices in a transaction."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy import insert, select, update

from engine_ext.plan.window import WindowPlan
from service import ids
from service.db.moves import rows_changed
from service.db.sessions import Database
from service.db.tables import Batch, BatchStatus, Model, Slice, SliceBatch, Window
from service.endpoints import ModelName
from service.jobs.costs import Costs
from service.jobs.desk import Desk
from service.jobs.fair_window import Span
from service.jobs.gather import Gathered, gather, plan_of
from service.jobs.pending import due, unplanned
from service.jobs.unleased import MOST_AGAIN, NONE, Leased, hold, take_back, unleased, with_again
from service.metrics import tracing
from service.objects.plan_artifact import Places, PlanArtifact, PlanHeader
from service.objects.plan_picture import Content, picture_of
from service.objects.request_index import IndexGone, forget_index
from service.objects.storage import Storage
from service.queue.crew import CrewBoard
from service.queue.urgency import urgent_at
from service.requests.tokens import prompt_tokens
from service.settings import Settings

SLICES_EACH = 8  # of a window for each worker, where there are several
SMALLEST_SLICE = 16  # requests; smaller slices would only cost more leases
SHARES_AT_ONCE = 5000  # of slices in one statement: a window of a thousand batches may have a hundred thousand
LOGGED = 64  # batches named in one log line
_without_texts: set[str] = set()  # sources of models whose tokenizer failed; until the process ends
log = structlog.get_logger()


class PlanOutdated(Exception):
    """A batch of the window was cancelled or planned by another process, so the window is not committed."""


def _expected(plan: WindowPlan, order: Places, spans: Sequence[Span]) -> list[list[float]]:
    """Return the compute seconds, memory seconds and output tokens that the plan expects of each span's new requests.

    `order`: the places of the requests, in the plan's order.
    """
    batch = order["batch"]
    is_new = order["request"] >= np.array([span.first for span in spans])[batch]
    columns = (plan.compute_s, plan.memory_s, plan.estimates.mean)
    sums = [np.bincount(batch, weights=each[plan.order] * is_new, minlength=len(spans)) for each in columns]
    return np.stack(sums, axis=1).tolist()


def _texts_of(source: str) -> Callable[[list[list[int]]], list[str]]:
    """Return what makes texts of token ids for people: no plan fails for their sake.

    A tokenizer is somebody else's file, and may be gone or broken in any way.
    """

    def decode(prompts: list[list[int]]) -> list[str]:
        if source in _without_texts:
            return [""] * len(prompts)
        try:
            return prompt_tokens(source).decode(prompts)
        except Exception as error:
            _without_texts.add(source)
            log.warning("pictures of plans show no texts", source=source, error=repr(error))
            return [""] * len(prompts)

    return decode


class Planner:
    """Plans windows of waiting requests, of one model and adapter at a time."""

    def __init__(
        self, database: Database, storage: Storage, settings: Settings, clock: Callable[[], float], redis: Redis
    ) -> None:
        self._database = database
        self._redis = redis
        self._storage = storage
        self._settings = settings
        self._clock = clock
        self._desk = Desk("planner", clock)
        self._costs = Costs(database, settings)

    async def run_once(self) -> bool:
        """Plan one window for a model whose requests are due. Returns whether it found one."""
        models = await due(self._database, self._settings, self._clock())
        async with self._desk.take(models) as name:
            if name is not None:
                spans = await unplanned(self._database, self._settings, models[name])
                if not spans:  # their batches have just ended
                    return True
                with tracing.stage("plan", (span.batch_id for span in spans), model=name):
                    try:
                        await self.plan(models[name], spans)
                    except Leased:  # workers may lease faster than plans are made, and new requests must not wait
                        await self._plan_new(models[name], spans)
                    except PlanOutdated as error:
                        log.info("plan abandoned", model=name, reason=str(error))
                    except IndexGone as gone:  # the next round plans the other batches
                        await forget_index(self._database, gone, self._clock())
                        raise
        return name is not None

    async def _plan_new(self, name: ModelName, wanted: list[Span]) -> None:
        """Plan only what is new."""
        try:
            await self.plan(name, wanted, again=False)
        except PlanOutdated as error:
            log.info("plan abandoned", model=str(name), reason=str(error))

    async def plan(self, name: ModelName, wanted: list[Span], again: bool = True) -> None:
        """Plan these requests, or as many as fit into a window's tokens, and commit. Raises PlanOutdated, Leased.

        With `again`, requests that no worker ever had are planned again with them, unless they are many more.
        """
        model, new = name.base, sum(span.count for span in wanted)
        most = min(MOST_AGAIN * new, self._settings.window_requests - new)
        before = await unleased(self._database, self._storage, name, most) if again else NONE
        found = await gather(self._database, self._storage, self._settings, with_again(wanted, before.spans))
        taken = before.slices if any(len(span.again) for span in found.spans) else ()
        cost = await self._costs.of(model)
        now = self._clock()
        slice_requests = await self._slice_requests(model, len(found.places))
        plan = await plan_of(found, cost, now, slice_requests, self._settings.shared_cache)
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
        content = await self._content(model, found)
        picture, texts = await asyncio.to_thread(picture_of, plan, content)
        await artifact.write(header, order, found.lines[plan.order], picture, texts)
        try:
            await self._commit(model, found.spans, taken, artifact.plan_id, plan, order, int(now))
        except (PlanOutdated, Leased):
            # Only this error makes it certain that nothing was committed; after any other, the sweeper decides.
            await artifact.delete()
            raise
        log.info(
            "planned",
            model=str(name),
            batches=header.batches[:LOGGED],
            requests=len(found.places),
            again=sum(len(span.again) for span in found.spans),
            slices=len(plan.slices),
            prompt_tokens=plan.prompt_tokens,
            sharing=round(plan.load.sharing, 4),
            sharing_kept=round(plan.sharing_kept, 4),
            density=round(plan.load.density, 4),
        )

    async def _content(self, model: str, found: Gathered) -> Content:
        """Return what the window's requests say and whose they are, for the plan's picture."""
        projects, owners = found.projects
        async with self._database.read() as session:
            source = (await session.scalars(select(Model.source).where(Model.name == model))).one_or_none()
        return Content(found.prompts, projects, owners, _texts_of(source or ""))

    async def _slice_requests(self, model: str, requests: int) -> int:
        """Return how many requests a slice of the window may have, so that each of the model's workers gets several."""
        most = self._settings.slice_requests
        try:
            workers = len(await CrewBoard(self._redis, model).look())
        except (RedisError, OSError) as error:
            log.warning("plans for one worker, because Redis does not tell of others", error=repr(error))
            workers = 1
        return most if workers < 2 else min(most, max(SMALLEST_SLICE, -(-requests // (SLICES_EACH * workers))))

    async def _commit(
        self,
        model: str,
        spans: list[Span],
        taken: Sequence[int],
        plan_id: str,
        plan: WindowPlan,
        order: Places,
        now: int,
    ) -> None:
        async with self._database.write() as session:
            await hold(session, taken, spans)
            expected = zip(spans, _expected(plan, order, spans), strict=True)
            for span, (compute_s, memory_s, tokens) in expected:
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
            parts, shares = [0] * len(spans), list[dict[str, Any]]()
            for each in slices:
                members, counts = np.unique(order["batch"][each.first : each.first + each.count], return_counts=True)
                for member, count in zip(members.tolist(), counts.tolist(), strict=True):
                    shares.append({"slice_id": each.id, "batch_id": spans[member].batch_id, "total": count})
                    parts[member] += 1
            for at in range(0, len(shares), SHARES_AT_ONCE):
                await session.execute(insert(SliceBatch), shares[at : at + SHARES_AT_ONCE])
            rest = Batch.planned - Batch.completed - Batch.failed
            for span, count in zip(spans, parts, strict=True):
                told = {"slices": Batch.slices + count, "slices_left": Batch.slices_left + count}
                await session.execute(
                    update(Batch).where(Batch.id == span.batch_id).values(**told, urgent_at=urgent_at(rest))
                )
            await take_back(session, taken)
