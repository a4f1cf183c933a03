"""Defines a batch's legal state changes, and the one function that makes them."""

from typing import Any

from sqlalchemy import ColumnElement, CursorResult, true, update
from sqlalchemy.ext.asyncio import AsyncSession

from service.db.tables import Batch, BatchStatus
from service.db.webhook_events import note_event

S = BatchStatus

# An expiring batch passes through finalizing, because its finished lines are written to files first. A batch whose
# answers were lost with their storage runs again what is missing.
BATCH_MOVES: dict[BatchStatus, frozenset[BatchStatus]] = {
    S.VALIDATING: frozenset({S.IN_PROGRESS, S.FAILED, S.CANCELLING, S.EXPIRED}),
    S.IN_PROGRESS: frozenset({S.FINALIZING, S.CANCELLING}),
    S.FINALIZING: frozenset({S.COMPLETED, S.EXPIRED, S.IN_PROGRESS}),
    S.CANCELLING: frozenset({S.CANCELLED}),
    S.COMPLETED: frozenset(),
    S.FAILED: frozenset(),
    S.EXPIRED: frozenset(),
    S.CANCELLED: frozenset(),
}

TERMINAL = frozenset(status for status, after in BATCH_MOVES.items() if not after)
LIVE = frozenset(BATCH_MOVES) - TERMINAL
STARTABLE = frozenset({S.VALIDATING, S.IN_PROGRESS})  # a held batch can be started in these states


async def move_batch(
    session: AsyncSession,
    batch_id: str,
    to: BatchStatus,
    *,
    now: float,
    only_if: ColumnElement[bool] | None = None,
    **values: Any,
) -> bool:
    """Move the batch, in one statement, if its present state allows it and `only_if` holds; return whether it moved.

    A batch that can no longer be started is no longer held.
    """
    if to not in STARTABLE:
        values["held"] = False
    if to in TERMINAL:
        values["ended_at"] = int(now)
    allowed = [status for status, after in BATCH_MOVES.items() if to in after]
    result = await session.execute(
        update(Batch)
        .where(Batch.id == batch_id, Batch.status.in_(allowed), true() if only_if is None else only_if)
        .values({"status": to, f"{to}_at": int(now), **values})
    )
    moved = rows_changed(result) == 1
    if moved and to in TERMINAL:
        await note_event(session, batch_id, f"batch.{to}", now)
    return moved


def rows_changed(result: Any) -> int:
    assert isinstance(result, CursorResult)
    return result.rowcount
