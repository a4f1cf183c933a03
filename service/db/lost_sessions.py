"""Ends sessions whose clients vanished inside a statement, and whose locks PostgreSQL would keep for hours."""

import structlog
from sqlalchemy import text

from service.db.sessions import APPLICATION, Database

LOST_S = 60.0  # for at least so long, a client may leave the server waiting

# asyncpg runs a statement that it has not prepared yet with two messages. Between these a session is "active", to which
# the timeout for idle transactions does not apply.
_END = text("""
    SELECT pg_terminate_backend(pid) AS ended, pid, host(client_addr) AS client, wait_event, state_change
    FROM pg_stat_activity
    WHERE datname = current_database() AND application_name = :application AND pg_has_role(usesysid, 'USAGE')
    AND state <> 'idle' AND wait_event IN ('ClientRead', 'ClientWrite') AND pid <> pg_backend_pid()
    AND state_change < clock_timestamp() - make_interval(secs => :lost_s)
""")
log = structlog.get_logger()


async def end_lost_sessions(database: Database, lost_s: float = LOST_S) -> int:
    """End our sessions in this database that have waited for their clients for `lost_s`; return how many.

    They may be those of other processes, as far as this process's role may end them. SQLite has no sessions.
    """
    if database.engine.dialect.name != "postgresql":
        return 0
    async with database.read() as session:
        found = (await session.execute(_END, {"application": APPLICATION, "lost_s": lost_s})).all()
    for row in found:
        about = {"pid": row.pid, "client": row.client, "waited_for": row.wait_event, "since": str(row.state_change)}
        log.warning("ended a database session whose client is gone", ended=row.ended, **about)
    return sum(row.ended for row in found)
