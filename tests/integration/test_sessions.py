"""What a connection to PostgreSQL is set to, whatever becomes of its transactions."""

import pytest
from sqlalchemy import text

from service.db.sessions import Database


async def test_a_client_that_is_gone_holds_its_locks_for_a_minute(database: Database) -> None:
    if database.engine.dialect.name != "postgresql":
        pytest.skip("SQLite has no clients that are elsewhere")
    for _ in range(3):
        async with database.write() as session:
            await session.execute(text("SELECT 1"))
            await session.rollback()
    async with database.read() as session:
        assert await session.scalar(text("SHOW idle_in_transaction_session_timeout")) == "1min"
