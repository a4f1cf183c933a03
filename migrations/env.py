"""Alembic's entry point: migrates over the service's own database engine, one process at a time."""

import asyncio

from alembic import context
from sqlalchemy import Connection, text

from service.db import tenant_tables
from service.db.sessions import Database

METADATA = tenant_tables.Base.metadata  # of all tables: those of `tables.py` come with it
LONGEST_S = 3600.0  # for one statement, such as an index of a large table
_LOCK = 0x62617463  # any number, the same in every process


def migrate(connection: Connection) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
    context.configure(connection=connection, target_metadata=METADATA, render_as_batch=True)
    with context.begin_transaction():
        context.run_migrations()


async def run() -> None:
    database = Database(context.config.get_main_option("sqlalchemy.url") or "", statement_s=LONGEST_S)
    async with database.write() as session:
        connection = await session.connection()
        await connection.run_sync(migrate)
    await database.close()


asyncio.run(run())
