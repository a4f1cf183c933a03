"""Writes and reads the row of a model, which the planner and each worker that serves it write."""

import time
from typing import Any, NamedTuple

from sqlalchemy import select
from sqlalchemy.dialects import postgresql, sqlite

from service.db.sessions import Database
from service.db.tables import Model
from service.settings import Settings


async def register_model(
    database: Database,
    settings: Settings,
    context_length: int | None,
    endpoints: list[str] | None = None,
    machine: dict[str, Any] | None = None,
) -> None:
    """Write the configured model's row; if it exists, update only the columns that the caller is the authority on.

    `context_length`: tokens of prompt and answer together. `endpoints`: those that a worker's engine serves, and
    `machine`: what it runs on (`told_machine`). The planner passes neither, and a fleet a machine that counts
    until a worker has told its own. The source of these two is the one that is stored, since the planner reads it.
    """
    row: dict[str, Any] = {
        "name": settings.served_model,
        "source": settings.model_source,
        "created_at": int(time.time()),
        "context_length": context_length,
        **({} if endpoints is None else {"endpoints": endpoints}),
        **({} if machine is None else {"machine": machine}),
    }
    told = ("source", "context_length") if endpoints is None else ("context_length", "endpoints", "machine")
    async with database.write() as session:
        insert = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
        statement = insert(Model).values(row)
        await session.execute(
            statement.on_conflict_do_update(
                index_elements=["name"], set_={name: row[name] for name in told if row.get(name) is not None}
            )
        )


class Served(NamedTuple):
    """Says what workers have told of a model: its endpoints, and how many tokens a prompt and its answer may have.

    Until one has, `endpoints` is empty and `context_length` is None.
    """

    endpoints: list[str]
    context_length: int | None


async def served_of(database: Database, name: str) -> Served | None:
    """Return what is known of the model of this name; None if there is no such model."""
    async with database.read() as session:
        row = (await session.scalars(select(Model).where(Model.name == name))).one_or_none()
    return None if row is None else Served(row.endpoints or [], row.context_length)
