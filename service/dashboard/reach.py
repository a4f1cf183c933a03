"""Decides what a viewer sees: its own project, or every project for an operator.

An operator's changes are made in the project that owns the object.
"""

from dataclasses import replace

from sqlalchemy import ColumnElement, select, true

from service import ids
from service.api.context import Context
from service.dashboard.sessions import Viewer
from service.db.tables import Batch, File
from service.db.tenant_tables import Project
from service.tenants import audit
from service.tenants.keys import Caller


def seen_by(viewer: Viewer) -> ColumnElement[bool]:
    """Return the condition for the batches that the viewer may see."""
    return true() if viewer.is_operator else Batch.project_id == viewer.caller.project.id


def project_seen(viewer: Viewer) -> str | None:
    """Return the project whose objects the viewer may list; None for all projects."""
    return None if viewer.is_operator else viewer.caller.project.id


async def as_owner(context: Context, viewer: Viewer, object_id: str) -> Caller:
    """Return the caller to use for this batch or file: an operator acts as the project that owns it.

    The audit log names the operator's key.
    """
    if not viewer.is_operator:
        return viewer.caller
    early = ids.early_file(object_id)
    batch_id = early[0] if early else object_id
    owner = select(Batch.project_id).where(Batch.id == batch_id)
    owner = owner.union_all(select(File.project_id).where(File.id == object_id))
    async with context.database.read() as session:
        project = (await session.scalars(select(Project).where(Project.id.in_(owner)))).one_or_none()
    return replace(viewer.caller, project=project) if project else viewer.caller


async def note_read(context: Context, viewer: Viewer, owner: Caller, object_id: str) -> None:
    """Record in the owner's audit log that an operator of another project reads texts of its requests."""
    if owner.project.id != viewer.caller.project.id:
        async with context.database.write() as session:
            audit.note(session, owner, "texts.read", object_id, context.clock())
