"""Changes projects and keys, each change with its line in the audit log; the caller holds the transaction."""

import re
from collections.abc import Mapping
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from service import ids
from service.db.clock import DAY_S
from service.db.moves import rows_changed
from service.db.tenant_tables import ApiKey, Project, Role, Tier
from service.errors import TenantError
from service.estimates.length_memory import forget
from service.tenants import audit
from service.tenants.keys import Caller, new_key

LONGEST_DAYS = 36500
LEAST_WEIGHT, MOST_WEIGHT = 1e-3, 1e3


async def find_project(session: AsyncSession, name: str) -> Project:
    """Return the project of this name. Raises TenantError if there is none."""
    found = (await session.scalars(select(Project).where(Project.name == name))).one_or_none()
    if found is None:
        raise TenantError(f"there is no project {name!r:.150}")
    return found


async def create_project(session: AsyncSession, name: str, actor: str, now: int) -> Project:
    """Create a project. Raises TenantError if the name is taken or invalid."""
    _check_name(name)
    project = Project(id=ids.project_id(), name=name, weight=1.0, created_at=now)
    try:
        async with session.begin_nested():
            session.add(project)
    except IntegrityError as error:
        raise TenantError(f"there is already a project {name!r}") from error
    audit.note(session, Caller(project, actor, Role.ADMIN), "project.create", project.id, now, name)
    return project


async def change_project(
    session: AsyncSession, project: Project, changes: Mapping[str, Any], actor: str, now: int
) -> None:
    """Change a project. `changes`: its weight, quotas and switches by column, None for no quota.

    A project that is not to remember lengths any more forgets those that it knows.
    """
    new = {name: value for name, value in changes.items() if getattr(project, name) != value}
    if new:
        await session.execute(update(Project).where(Project.id == project.id).values(**new))
        if new.get("remembers_lengths") is False:
            await forget(session, project.id)
        said = ", ".join(f"{name} {'none' if value is None else value}" for name, value in new.items())
        audit.note(session, Caller(project, actor, Role.ADMIN), "project.set", project.id, now, said)


async def create_key(
    session: AsyncSession,
    project: Project,
    name: str,
    role: Role,
    days: int | None,
    actor: str,
    now: int,
    tier: Tier | None = None,
) -> tuple[str, str]:
    """Return a new key's text, which is not stored, and its id; it expires after `days`. Raises TenantError."""
    _check_name(name)
    text, row = new_key(project.id, name, role, now, now + days * DAY_S if days else None, tier)
    session.add(row)
    said = f"{name}: {role}, {f'{days} days' if days else 'never expires'}{f', tier {tier}' if tier else ''}"
    audit.note(session, Caller(project, actor, Role.ADMIN), "key.create", row.id, now, said)
    return text, row.id


async def revoke_key(session: AsyncSession, key_id: str, actor: str, now: int) -> None:
    """Revoke a key. Raises TenantError if it is unknown or already revoked."""
    good = (ApiKey.id == key_id) & ApiKey.revoked_at.is_(None)
    if rows_changed(await session.execute(update(ApiKey).where(good).values(revoked_at=now))) != 1:
        raise TenantError(f"the key {key_id!r:.100} does not exist or is already revoked")
    owner = select(Project).join(ApiKey, ApiKey.project_id == Project.id).where(ApiKey.id == key_id)
    project = (await session.scalars(owner)).one()
    audit.note(session, Caller(project, actor, Role.ADMIN), "key.revoke", key_id, now)


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[^\x00-\x1f\x7f\ud800-\udfff]{1,128}", name):
        rule = "use 1 to 128 valid Unicode characters and no control characters"
        raise TenantError(f"{name!r:.150} is not a valid name: {rule}")
