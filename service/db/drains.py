"""Drained workers, which take no new slices. A drain outlives a worker's restart under the same name."""

from sqlalchemy import delete, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from service.db.moves import rows_changed
from service.db.tables import DrainedWorker


async def drain(session: AsyncSession, worker: str, now: float) -> None:
    insert = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    await session.execute(insert(DrainedWorker).values(name=worker, since=int(now)).on_conflict_do_nothing())


async def resume(session: AsyncSession, worker: str) -> bool:
    """Let a worker, or the next one of its name, take slices; return whether it was drained."""
    return rows_changed(await session.execute(delete(DrainedWorker).where(DrainedWorker.name == worker))) > 0


async def drained_workers(session: AsyncSession) -> set[str]:
    return set(await session.scalars(select(DrainedWorker.name)))
