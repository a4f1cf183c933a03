"""How far a viewer sees: its own project; operators all of them, and what they change they change there."""

from dataclasses import replace

from sqlalchemy import ColumnElement, select, true

from service import ids
from service.api.context import Context
from service.dashboard.sessions import Viewer
from service.db.tables import Batch, File, Project
from service.tenants.keys import Caller


def seen_by(viewer: Viewer) -> ColumnElement[bool]:
    """Which batches."""
    return true() if viewer.is_operator else Batch.project_id == viewer.caller.project.id


def project_seen(viewer: Viewer) -> str | None:
    """Whose objects are listed; None: everybody's."""
    return None if viewer.is_operator else viewer.caller.project.id


async def as_owner(here: Context, viewer: Viewer, object_id: str) -> Caller:
    """Who asks for this batch or file: an operator as the project that owns it. The audit log names the key."""
    if not viewer.is_operator:
        return viewer.caller
    early = ids.early_file(object_id)
    batch_id = early[0] if early else object_id
    owner = select(Batch.project_id).where(Batch.id == batch_id)
    owner = owner.union_all(select(File.project_id).where(File.id == object_id))
    async with here.database.read() as session:
        project = (await session.scalars(select(Project).where(Project.id.in_(owner)))).one_or_none()
    return replace(viewer.caller, project=project) if project else viewer.caller
