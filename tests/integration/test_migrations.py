"""Migrations make what the tables say, and can be undone."""

import asyncio
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, inspect, text
from typer.testing import CliRunner

from batchweave.table import command_line
from service.db.migrate import config, downgrade, newest, upgrade
from service.db.sessions import Database
from service.db.tables import Base
from service.errors import StartError
from tests.integration.harness import Harness, ScriptedEngine, jsonl, line
from tests.integration.test_beyond import answered_are
from tests.waiting import until

CHANGELOG = Path(__file__).parents[2] / "CHANGELOG.md"
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


def test_the_changelog_names_the_newest_schema() -> None:
    first = next(line for line in CHANGELOG.read_text().splitlines() if line.startswith("## "))
    assert first.endswith(f"schema {newest()}")


def test_a_newer_schema_is_said_with_what_to_do(empty_database_url: str) -> None:
    upgrade(empty_database_url)

    async def by_another_version() -> None:
        database = Database(empty_database_url)
        async with database.write() as session:
            await session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
        await database.close()

    asyncio.run(by_another_version())
    with pytest.raises(StartError, match=f"schema 9999, which this version does not know.*migrate --to {newest()}"):
        upgrade(empty_database_url)
    with pytest.raises(StartError):
        downgrade(empty_database_url, "0001")


def test_migrate_makes_no_database_where_there_is_none(tmp_path: Path) -> None:
    """A data folder that is misspelled would get one, and the service's own would stay as it is."""
    found = CliRunner().invoke(command_line("migrate"), ["migrate", "--data-dir", str(tmp_path / "typo")])
    assert found.exit_code == 1
    assert f"there is no database at {tmp_path / 'typo' / 'batchweave.db'}" in found.output.replace("\n", "")
    assert not (tmp_path / "typo").exists()


async def test_a_batch_survives_the_way_back_and_forward(harness: Harness) -> None:
    """As an operator goes who finds the newer version bad: its last migration is undone in the middle of a batch."""
    batch_id = await harness.submit(jsonl(line(n) for n in range(40)))
    await harness.plan()
    held = ScriptedEngine(hold=asyncio.Event(), hold_after=20)
    async with harness.working(held):
        await until(lambda: answered_are(harness, batch_id, 20))
    await asyncio.to_thread(downgrade, harness.settings.database, "-1")
    await asyncio.to_thread(upgrade, harness.settings.database)
    engine = ScriptedEngine()
    async with harness.working(engine):
        [batch] = await harness.until_ended(batch_id)
    output, errors = await harness.results(batch)
    assert (len(output), errors) == (40, {})
    assert 0 < engine.runs.total() < 40  # what was answered before is not asked again
