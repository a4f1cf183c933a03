"""The row of a model, written by the planner and by each worker that serves it."""

import time
from typing import Any

from sqlalchemy.dialects import postgresql, sqlite

from service.db.sessions import Database
from service.db.tables import Model
from service.settings import Settings


async def register_model(
    database: Database, settings: Settings, context_length: int | None, endpoints: list[str] | None = None
) -> None:
    """Write the configured model's row, or what the caller knows better than the row there is.

    `context_length`: tokens of prompt and answer together. `endpoints`: those that a worker's engine serves; the
    planner gives none. The planner's source counts, since it is the one that reads it.
    """
    row: dict[str, Any] = {
        "name": settings.served_model,
        "source": settings.model_source,
        "created_at": int(time.time()),
        "context_length": context_length,
        **({} if endpoints is None else {"endpoints": endpoints}),
    }
    told = ("source", "context_length") if endpoints is None else ("context_length", "endpoints")
    async with database.write() as session:
        insert = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
        statement = insert(Model).values(row)
        await session.execute(
            statement.on_conflict_do_update(
                index_elements=["name"], set_={name: row[name] for name in told if row[name] is not None}
            )
        )
