"""Cursor pages over a table whose rows are numbered by `seq`: added or deleted rows do not shift the other rows."""

from typing import Any, Literal

from sqlalchemy import ColumnElement, Select, select, true, tuple_
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from service.db.tables import Batch, File, WebhookEndpoint
from service.errors import BadRequest

Order = Literal["asc", "desc"]
Listed = type[File] | type[Batch] | type[WebhookEndpoint]


def listed(table: Listed, project_id: str | None) -> tuple[ColumnElement[bool], list[InstrumentedAttribute[Any]]]:
    """Return the condition for the project's rows, all rows with None, and the columns by which to order them."""
    if project_id is None:
        return true(), [table.seq]
    # A range of one project. With `==`, PostgreSQL would read all projects' rows by `seq`, assuming that this project's
    # are spread evenly among them. For a project that was busy long ago it would read everything since.
    return table.project_id.between(project_id, project_id), [table.project_id, table.seq]


async def page_rows(
    session: AsyncSession,
    table: Listed,
    query: Select[Any],
    project_id: str | None,
    *,
    after: str | None,
    limit: int,
    order: Order = "desc",
) -> list[Any]:
    """Return up to `limit + 1` of the project's rows that follow the object `after`; of all projects with None.

    Raises BadRequest if `after` does not exist.
    """
    mine, place = listed(table, project_id)
    query = query.where(mine)
    if after is not None:
        cursor = (await session.execute(select(table.seq).where(table.id == after, mine))).scalar_one_or_none()
        if cursor is None:
            raise BadRequest(f"No object has the id {after!r} given in 'after'.", param="after")
        here, last = tuple_(*place), tuple_(*([cursor] if project_id is None else [project_id, cursor]))
        query = query.where(here < last if order == "desc" else here > last)
    query = query.order_by(*(each.desc() if order == "desc" else each.asc() for each in place)).limit(limit + 1)
    return list((await session.scalars(query)).all())
