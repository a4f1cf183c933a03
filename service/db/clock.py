"""One time for all processes: the database's. Hosts' clocks may differ by hours, and nothing goes wrong."""

import time
from typing import Any

from sqlalchemy import Float, select
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from service.db.sessions import Database

SYNC_S = 60.0


class now_s(FunctionElement[float]):
    """Unix seconds by the database's clock, as a part of a statement."""

    type = Float(53)
    inherit_cache = True


@compiles(now_s, "postgresql")
def _of_postgres(_element: now_s, _compiler: Any, **_options: Any) -> str:
    return "CAST(extract(epoch FROM clock_timestamp()) AS DOUBLE PRECISION)"


@compiles(now_s, "sqlite")
def _of_sqlite(_element: now_s, _compiler: Any, **_options: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


class SharedClock:
    """Unix seconds by the database's clock, counted on by this process's steady clock from one `sync` to the next.

    Before the first `sync` it is the host's clock.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._ahead_s = time.time() - time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() + self._ahead_s

    async def sync(self) -> None:
        """Read the database's clock, which is that of the moment halfway between question and answer."""
        async with self._database.read() as session:
            asked = time.monotonic()
            said = float((await session.execute(select(now_s()))).scalar_one())
            self._ahead_s = said - (asked + time.monotonic()) / 2
