"""Writes the audit log: who changed what."""

from sqlalchemy.ext.asyncio import AsyncSession

from service.db.tenant_tables import AuditEvent
from service.tenants.keys import Caller


def note(session: AsyncSession, caller: Caller, action: str, object_id: str, now: float, detail: str = "") -> None:
    """Record an action in the transaction of the change itself; `detail`: what changed, in words."""
    event = AuditEvent(
        at=int(now),
        project_id=caller.project.id,
        actor=caller.actor,
        action=action,
        object_id=object_id,
        detail=detail,
    )
    session.add(event)
