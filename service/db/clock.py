"""Gives all processes one clock, the database's, so that hosts' clocks may differ by hours without harm."""

import time
from typing import Any

from sqlalchemy import Float, select
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from service.db.sessions import Database

SYNC_S = 60.0
DAY_S = 24 * 3600


class now_s(FunctionElement[float]):
    """An SQL expression for unix seconds by the database's clock."""

    type = Float(53)
    inherit_cache = True


@compiles(now_s, "postgresql")
def _of_postgres(_element: now_s, _compiler: Any, **_options: Any) -> str:
    return "CAST(extract(epoch FROM clock_timestamp()) AS DOUBLE PRECISION)"


@compiles(now_s, "sqlite")
def _of_sqlite(_element: now_s, _compiler: Any, **_options: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


class SharedClock:
    """Returns unix seconds by the database's clock; between calls of `sync` this process's monotonic clock advances it.

    Before the first `sync` it is the host's clock.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._ahead_s = time.time() - time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() + self._ahead_s

    async def sync(self) -> None:
        """Read the database's clock, and assume that it was read halfway between query and reply."""
        async with self._database.read() as session:
            asked = time.monotonic()
            said = float((await session.execute(select(now_s()))).scalar_one())
            self._ahead_s = said - (asked + time.monotonic()) / 2
