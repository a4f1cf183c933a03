"""Opens sessions on SQLite or PostgreSQL through one code path."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, nullcontext
from contextvars import ContextVar
from typing import Any
from weakref import WeakValueDictionary

from sqlalchemy import Connection, event, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

APPLICATION = "batchweave"  # the name of our sessions in pg_stat_activity
CONNECTIONS = 4
READS_EACH = CONNECTIONS - 1  # of one reader at one time, in a process
_WRITE = "batchweave_write"


# The reader of a task: a project, or, until that is known, what it sent as its key; "" is the service itself.
reader: ContextVar[str] = ContextVar("reader", default="")


class Database:
    """Opens transactions: `read()` and `write()`. On SQLite a write locks at its start, so it never deadlocks."""

    def __init__(
        self, url: str, timeout_s: float = 30.0, statement_s: float | None = None, connections: int = CONNECTIONS
    ) -> None:
        """Allow `connections` at one time; others wait for one.

        `timeout_s`: a server that is silent for so long counts as gone, and the transaction raises TimeoutError.
        `statement_s`: for how long a server that is connected may be silent, if it is not `timeout_s`.
        """
        is_sqlite = url.startswith("sqlite")
        waits = {"timeout": timeout_s, "command_timeout": timeout_s if statement_s is None else statement_s}
        arguments = {} if is_sqlite else {**waits, "server_settings": {"application_name": APPLICATION}}
        self.engine = create_async_engine(
            url,
            pool_pre_ping=not is_sqlite,
            pool_size=connections,
            max_overflow=0,
            pool_use_lifo=True,
            pool_timeout=timeout_s,
            hide_parameters=True,
            connect_args=arguments,
        )
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by project
        self._reads: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # by reader
        self._writing = self.engine.execution_options(**{_WRITE: True})
        if is_sqlite:
            event.listen(self.engine.sync_engine, "connect", _configure_sqlite)
            event.listen(self.engine.sync_engine, "begin", _begin_sqlite)
        else:
            event.listen(self.engine.sync_engine, "connect", _configure_postgres)

    @asynccontextmanager
    async def read(self) -> AsyncGenerator[AsyncSession, None]:
        """Open a transaction that reads. Those of one reader wait for each other before they have a
        connection: others need it.

        In such a block nothing else may read.
        """
        whose = reader.get()
        turn = self._reads.setdefault(whose, asyncio.Semaphore(READS_EACH)) if whose else nullcontext()
        async with turn, self._session(self.engine) as session:
            yield session

    @asynccontextmanager
    async def write(self, project_id: str | None = None) -> AsyncGenerator[AsyncSession, None]:
        """Open a transaction that writes. `project_id`: the project whose row it locks (`tenants/quotas.py`).

        Those of one project wait for each other before they have a connection: others need it.
        """
        turn = nullcontext() if project_id is None else self._turns.setdefault(project_id, asyncio.Lock())
        async with turn, self._session(self._writing) as session:
            yield session

    @asynccontextmanager
    async def _session(self, engine: AsyncEngine) -> AsyncGenerator[AsyncSession, None]:
        try:
            async with AsyncSession(engine, expire_on_commit=False) as session, session.begin():
                yield session
        except TimeoutError:
            # When one connection is dead the others are too; without this each would have to time out by itself.
            await self.engine.dispose(close=False)
            raise

    async def check(self) -> None:
        """Raise when the database cannot be reached."""
        async with self.read() as session:
            await session.execute(text("SELECT 1"))

    async def close(self) -> None:
        await self.engine.dispose()


def _configure_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # the driver must not begin transactions: we do
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "busy_timeout=30000", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _configure_postgres(connection: Any, _record: Any) -> None:
    """Limit idle transactions: a client that the network cuts off inside one must not hold its locks for hours.

    `lost_sessions.py` ends those that are cut off inside a statement.
    """
    cursor = connection.cursor()
    cursor.execute("SET idle_in_transaction_session_timeout = '60s'")
    cursor.close()
    connection.commit()  # or the first rollback undoes the setting


def _begin_sqlite(connection: Connection) -> None:
    writing = connection.get_execution_options().get(_WRITE)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writing else "BEGIN")
