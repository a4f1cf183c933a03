"""Migrations make what the tables say, and can be undone."""

import asyncio

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, inspect

from service.db.migrate import config, upgrade
from service.db.sessions import Database
from service.db.tables import Base

pytestmark = pytest.mark.dialects


def look(url: str, at: object) -> object:
    async def run() -> object:
        database = Database(url)
        try:
            async with database.read() as session:
                return await (await session.connection()).run_sync(at)  # type: ignore[arg-type]
        finally:
            await database.close()

    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(run())
    finally:
        loop.close()


def differences(connection: Connection) -> object:
    return compare_metadata(MigrationContext.configure(connection), Base.metadata)


def table_names(connection: Connection) -> object:
    return set(inspect(connection).get_table_names())


def test_migrations_make_the_tables(empty_database_url: str) -> None:
    upgrade(empty_database_url)
    assert look(empty_database_url, differences) == []
    upgrade(empty_database_url)  # again, as every start does


def test_migrations_can_be_undone(empty_database_url: str) -> None:
    upgrade(empty_database_url)
    assert look(empty_database_url, table_names) == {*Base.metadata.tables, "alembic_version"}
    command.downgrade(config(empty_database_url), "base")
    assert look(empty_database_url, table_names) == {"alembic_version"}
    upgrade(empty_database_url)
    assert look(empty_database_url, differences) == []
