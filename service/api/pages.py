"""Cursor pages over a table whose rows are numbered by `seq`: added or deleted rows do not shift the other rows."""

from typing import Any, Literal

from sqlalchemy import Select, select, true
from sqlalchemy.ext.asyncio import AsyncSession

from service.db.tables import Batch, File, WebhookEndpoint
from service.errors import BadRequest

Order = Literal["asc", "desc"]


async def page_rows(
    session: AsyncSession,
    table: type[File] | type[Batch] | type[WebhookEndpoint],
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
    mine = true() if project_id is None else table.project_id == project_id
    query = query.where(mine)
    if after is not None:
        cursor = (await session.execute(select(table.seq).where(table.id == after, mine))).scalar_one_or_none()
        if cursor is None:
            raise BadRequest(f"No object has the id {after!r} given in 'after'.", param="after")
        query = query.where(table.seq < cursor if order == "desc" else table.seq > cursor)
    query = query.order_by(table.seq.desc() if order == "desc" else table.seq.asc()).limit(limit + 1)
    return list((await session.scalars(query)).all())
