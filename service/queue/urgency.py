"""Which ready slices come next: those of batches with the least slack, pool by pool, in the order of their plans.

Slack is what is left of a batch's time once its own remaining work is taken off. Inside a pool the plan's order stays,
in which slices that share a prefix stand together; between pools nothing that is less urgent comes first.
"""

from collections.abc import Sequence

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from service.db.sessions import Database
from service.db.tables import Batch, BatchStatus, Slice, SliceBatch, SliceStatus

HOUR_S = 3600.0
POOLS_S = (0.25 * HOUR_S, HOUR_S, 4 * HOUR_S, 12 * HOUR_S)  # up to so much slack; the last pool has all the rest


async def waiting_models(database: Database) -> Sequence[str]:
    """Models that have ready slices."""
    async with database.read() as session:
        return (await session.scalars(select(Slice.model).where(Slice.status == SliceStatus.READY).distinct())).all()


async def most_urgent(database: Database, model: str, now: float, most: int) -> list[int]:
    """Ids of the model's first ready slices."""
    found: list[int] = []
    async with database.read() as session:
        pools: dict[int, list[str]] = {}
        for batch_id, slack_s in (await _slack(session, model, now)).items():
            pools.setdefault(sum(slack_s > each for each in POOLS_S), []).append(batch_id)
        for pool in sorted(pools):
            ready = (
                select(Slice.id)
                .join(SliceBatch, SliceBatch.slice_id == Slice.id)
                .where(Slice.model == model, Slice.status == SliceStatus.READY, SliceBatch.batch_id.in_(pools[pool]))
                .group_by(Slice.id)
                .order_by(Slice.id)
                .limit(most)
            )
            found += [each for each in await session.scalars(ready) if each not in found]
            if len(found) >= most:
                return found[:most]
        if not found:  # of batches that have ended meanwhile: whoever claims them sees it
            ready = select(Slice.id).where(Slice.model == model, Slice.status == SliceStatus.READY)
            found += await session.scalars(ready.order_by(Slice.id).limit(most))
    return found


async def _slack(session: AsyncSession, model: str, now: float) -> dict[str, float]:
    """Seconds by batch that runs; its work by the cost model, as if one engine had it alone."""
    rows = await session.execute(
        select(
            Batch.id,
            Batch.expires_at,
            Batch.planned,
            Batch.planned_compute_s,
            Batch.planned_memory_s,
            func.sum(SliceBatch.total),
        )
        .join(SliceBatch, SliceBatch.batch_id == Batch.id)
        .join(Slice, Slice.id == SliceBatch.slice_id)
        .where(Slice.model == model, Batch.status == BatchStatus.IN_PROGRESS, Slice.status != SliceStatus.DONE)
        .group_by(Batch.id, Batch.expires_at, Batch.planned, Batch.planned_compute_s, Batch.planned_memory_s)
    )
    return {
        batch_id: expires_at - now - max(compute_s, memory_s) * int(left) / max(planned, 1)
        for batch_id, expires_at, planned, compute_s, memory_s, left in rows
    }
