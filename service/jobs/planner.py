"""The planner: gathers what waits for a model into a window, plans it, and commits its slices in one transaction."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import structlog
from numpy.typing import NDArray
from sqlalchemy import select, update

from engine_ext.plan.prompts import Prompts
from engine_ext.plan.window import WindowPlan, plan_window
from service import ids
from service.db.moves import rows_changed
from service.db.sessions import Database
from service.db.tables import Batch, BatchStatus, Slice, SliceBatch, Window
from service.plan_artifact import PLACE, Places, PlanArtifact, PlanHeader
from service.request_index import RequestIndex
from service.settings import Settings
from service.storage import Storage

log = structlog.get_logger()


class PlanOutdated(Exception):
    """A batch of the window was cancelled or planned by someone else meanwhile; the window is not committed."""


@dataclass(frozen=True, slots=True)
class Part:
    """The requests [first, first + count) of a batch that go into the window."""

    batch_id: str
    first: int
    count: int


class Planner:
    def __init__(self, database: Database, storage: Storage, settings: Settings, clock: Callable[[], float]) -> None:
        self._database = database
        self._storage = storage
        self._settings = settings
        self._clock = clock

    async def run_once(self) -> int:
        """Plan one window for each model with pending requests; returns how many windows."""
        pending = await self._pending()
        for model, parts in pending.items():
            try:
                await self.plan(model, parts)
            except PlanOutdated as error:
                log.info("plan given up", model=model, reason=str(error))
        return len(pending)

    async def _pending(self) -> dict[str, list[Part]]:
        """By model, what is not planned yet, earliest deadline first, up to the window's size."""
        async with self._database.read() as session:
            batches = (
                await session.scalars(
                    select(Batch)
                    .where(Batch.status == BatchStatus.IN_PROGRESS, Batch.planned < Batch.total)
                    .order_by(Batch.expires_at, Batch.seq)
                )
            ).all()
        pending: dict[str, list[Part]] = {}
        for batch in batches:
            parts = pending.setdefault(batch.model or "", [])
            room = self._settings.window_requests - sum(part.count for part in parts)
            if room > 0:
                parts.append(Part(batch.id, batch.planned, min(batch.total - batch.planned, room)))
        return pending

    async def plan(self, model: str, parts: list[Part]) -> None:
        """Plan these requests and commit. Raises PlanOutdated."""
        places, prompts = await self._read(parts)
        plan = await asyncio.to_thread(plan_window, prompts, self._settings.slice_requests)
        artifact = PlanArtifact(self._storage, ids.plan_id())
        now = int(self._clock())
        header = PlanHeader(
            model=model,
            batches=[part.batch_id for part in parts],
            requests=len(places),
            prompt_tokens=plan.prompt_tokens,
            sharing=plan.sharing,
            slices=[(each.first, each.count) for each in plan.slices],
            created_at=now,
        )
        order = places[plan.order]
        await artifact.write(header, order)
        try:
            await self._commit(model, parts, artifact.plan_id, plan, order, now)
        except BaseException:
            await artifact.delete()
            raise
        log.info(
            "planned",
            model=model,
            requests=len(places),
            slices=len(plan.slices),
            prompt_tokens=plan.prompt_tokens,
            sharing=round(plan.sharing, 4),
        )

    async def _read(self, parts: list[Part]) -> tuple[Places, Prompts]:
        places: list[NDArray[np.void]] = []
        tokens: list[NDArray[np.uint32]] = []
        lengths: list[NDArray[np.int64]] = []
        for number, part in enumerate(parts):
            index = RequestIndex(self._storage, part.batch_id)
            records = await index.read(part.first, part.count)
            place = np.zeros(part.count, dtype=PLACE)
            place["batch"] = number
            place["request"] = np.arange(part.first, part.first + part.count)
            places.append(place)
            lengths.append(records["tokens"].astype(np.int64))
            tokens.append(await index.token_ids(records))
        starts = np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int64)
        return np.concatenate(places), Prompts(np.concatenate(tokens), starts)

    async def _commit(
        self, model: str, parts: list[Part], plan_id: str, plan: WindowPlan, order: Places, now: int
    ) -> None:
        async with self._database.write() as session:
            for part in parts:
                result = await session.execute(
                    update(Batch)
                    .where(
                        Batch.id == part.batch_id,
                        Batch.status == BatchStatus.IN_PROGRESS,
                        Batch.planned == part.first,
                    )
                    .values(planned=part.first + part.count)
                )
                if rows_changed(result) != 1:
                    raise PlanOutdated(f"{part.batch_id} has changed")
            window = Window(model=model, plan_id=plan_id, created_at=now)
            session.add(window)
            await session.flush()
            slices = [
                Slice(window_id=window.id, model=model, first=each.first, count=each.count) for each in plan.slices
            ]
            session.add_all(slices)
            await session.flush()
            for each in slices:
                members, counts = np.unique(order["batch"][each.first : each.first + each.count], return_counts=True)
                for member, count in zip(members.tolist(), counts.tolist(), strict=True):
                    session.add(SliceBatch(slice_id=each.id, batch_id=parts[member].batch_id, total=count))
