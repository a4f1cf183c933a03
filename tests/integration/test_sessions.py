"""What a connection to PostgreSQL is set to, whatever becomes of its transactions."""

import httpx
import pytest
from sqlalchemy import make_url, text

from service.db.sessions import Database
from service.settings import Settings
from tests.conftest import Clock
from tests.integration.serving import serve


async def test_a_client_that_is_gone_holds_its_locks_for_a_minute(database: Database) -> None:
    if database.engine.dialect.name != "postgresql":
        pytest.skip("SQLite has no clients that are elsewhere")
    for _ in range(3):
        async with database.write() as session:
            await session.execute(text("SELECT 1"))
            await session.rollback()
    async with database.read() as session:
        assert await session.scalar(text("SHOW idle_in_transaction_session_timeout")) == "1min"


async def test_a_server_that_refuses_a_connection_counts_as_away(settings: Settings, clock: Clock) -> None:
    """As one does that starts again: clients are told to try later."""
    assert settings.database_url is not None
    if settings.database_url.startswith("sqlite"):
        pytest.skip("SQLite has no server")
    url = make_url(settings.database_url).set(database="there-is-none").render_as_string(hide_password=False)
    with serve(settings.model_copy(update={"database_url": url}), clock) as api:
        answer = httpx.get(f"{api}/v1/batches")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "database_unavailable")
