"""Writes and reads the row of a model, which the planner and each worker that serves it write."""

import time
from collections.abc import Mapping, Set
from types import MappingProxyType
from typing import Any

from sqlalchemy import ColumnElement, delete, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from service.db.sessions import Database
from service.db.tables import Batch, Model
from service.endpoints import ADAPTER, BY_PATH, ModelName
from service.settings import AUTO, Settings

NO_PARSERS: Mapping[str, str | None] = MappingProxyType({"tool_parser": None, "reasoning_parser": None})
STAND_IN = "stand_in"  # in the machine of a model: its GPU stands in for what no cost model describes


def asks_for(name: ModelName) -> ColumnElement[bool]:
    """Return the condition that a batch's requests name this model and adapter, or no adapter."""
    return (Batch.model == name.base) & (Batch.adapter == name.adapter)  # None becomes IS NULL


async def register_model(
    database: Database,
    settings: Settings,
    context_length: int | None,
    endpoints: list[str] | None = None,
    machine: dict[str, Any] | None = None,
    parsers: Mapping[str, str | None] = NO_PARSERS,
    knows_adapters: bool = True,
) -> None:
    """Write the rows of the configured model and its adapters; the caller updates only what it is the authority on.

    `context_length`: tokens of prompt and answer together. `endpoints`: those that a worker's engine serves, `machine`:
    what it runs on (`told_machine`), `parsers`: what finds tool calls and thoughts in its answers, by the columns of
    the row. The planner passes none of these, and a fleet a machine that counts until a worker has told its own. The
    source of these two is the one that is stored, since the planner reads it. `knows_adapters`: whether the model has
    no other adapters than those of the settings.
    """
    about: dict[str, Any] = {
        "source": settings.model_source,
        "created_at": int(time.time()),
        "context_length": context_length,
        **({} if endpoints is None else {"endpoints": endpoints}),
        **({} if machine is None else {"machine": machine}),
        **parsers,
    }
    told = ("source", "context_length") if endpoints is None else ("context_length", "endpoints", "machine")
    begins = f"{settings.served_model}{ADAPTER}"
    async with database.write() as session:
        insert = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
        for name in settings.served_models:
            row = {"name": name, **about}
            if endpoints is not None and ModelName.of(name).adapter:
                row["endpoints"] = [each for each in endpoints if BY_PATH[each].adapters]
            newer = {column: row[column] for column in told if row.get(column) is not None}
            if endpoints is not None:
                newer |= parsers  # also None: nothing is known of it any more
            statement = insert(Model).values(row)
            await session.execute(statement.on_conflict_do_update(index_elements=["name"], set_=newer))
        if knows_adapters:
            are_adapters = func.substr(Model.name, 1, len(begins)) == begins  # LIKE knows no case in SQLite
            await session.execute(delete(Model).where(are_adapters, Model.name.not_in(settings.served_models)))


async def timed_models(session: AsyncSession, names: Set[str], settings: Settings) -> set[str]:
    """Return those of these models for whose machine the cost model speaks, so that its seconds mean something.

    A machine that nobody has told is that of the settings, if they name a GPU.
    """
    rows = await session.execute(select(Model.name, Model.machine).where(Model.name.in_(names)))
    machines = dict(rows.tuples().all())
    told = {name: machines.get(name) for name in names}
    return {name for name, each in told.items() if (STAND_IN not in each if each else settings.gpu != AUTO)}


async def endpoints_of(database: Database, name: str) -> list[str] | None:
    """Return the endpoints that workers serve the model on, none until one has told; None if there is no such model."""
    async with database.read() as session:
        row = (await session.scalars(select(Model).where(Model.name == name))).one_or_none()
    return None if row is None else row.endpoints or []
