"""What `up` asks of the database about one of its workers; a database that does not answer stops nothing here."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog
from sqlalchemy.exc import SQLAlchemyError

from service.db.drains import drained_workers
from service.db.sessions import Database
from service.queue.leases import free_held

ANSWER_S = 5.0
T = TypeVar("T")
log = structlog.get_logger()


def free_slices(database_url: str, worker: str) -> None:
    """Free what a worker held whose process has ended, so that others need not wait until its leases expire."""
    if freed := _ask(database_url, lambda database: free_held(database, worker)):
        log.info("freed the slices of a worker that died", worker=worker, slices=freed)


def is_drained(database_url: str, worker: str) -> bool | None:
    """Return whether a worker is drained; None if the database does not say."""

    async def look(database: Database) -> bool:
        async with database.read() as session:
            return worker in await drained_workers(session)

    return _ask(database_url, look)


def _ask(database_url: str, ask: Callable[[Database], Awaitable[T]]) -> T | None:
    async def asked() -> T:
        database = Database(database_url, timeout_s=ANSWER_S, connections=1)
        try:
            async with asyncio.timeout(ANSWER_S):
                return await ask(database)
        finally:
            await database.close()

    try:
        return asyncio.run(asked())
    except (SQLAlchemyError, OSError, TimeoutError) as error:
        log.warning("the database does not answer", error=repr(error))
        return None
