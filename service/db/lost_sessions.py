"""Ends sessions whose clients vanished inside a transaction, and whose locks PostgreSQL would keep for hours."""

import structlog
from sqlalchemy import text

from service.db.sessions import APPLICATION, Database

LOST_S = 60.0  # far longer than a client that lives needs between two messages of one transaction

_END = text("""
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE datname = current_database() AND usename = current_user AND application_name = :application
    AND state <> 'idle' AND wait_event = 'ClientRead' AND pid <> pg_backend_pid()
    AND state_change < clock_timestamp() - make_interval(secs => :lost_s)
""")
log = structlog.get_logger()


async def end_lost_sessions(database: Database, lost_s: float = LOST_S) -> int:
    """End our sessions in this database that have waited for their clients for `lost_s`; return how many.

    SQLite has no sessions, so there is nothing to do.
    """
    if database.engine.dialect.name != "postgresql":
        return 0
    async with database.read() as session:
        ended = (await session.scalars(_END, {"application": APPLICATION, "lost_s": lost_s})).all()
    if ended:
        log.warning("ended database sessions whose clients are gone", sessions=len(ended))
    return len(ended)
