"""Changes of projects and keys, each with its line in the audit log; whoever calls holds the transaction."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from service import ids
from service.db.tables import ApiKey, Project, Role
from service.tenants import audit
from service.tenants.keys import Caller, new_key

DAY_S = 86400
LONGEST_DAYS = 36500
LEAST_WEIGHT, MOST_WEIGHT = 1e-3, 1e3


class NoSuch(Exception):
    """A name or id stands for nothing, or for something already; the message says so."""


async def find_project(session: AsyncSession, name: str) -> Project:
    """Raises NoSuch."""
    found = (await session.scalars(select(Project).where(Project.name == name))).one_or_none()
    if found is None:
        raise NoSuch(f"no project {name!r}; make it: batchweave projects create {name}")
    return found


async def create_project(session: AsyncSession, name: str, actor: str, now: int) -> Project:
    """Raises NoSuch for a name that is taken."""
    if (await session.scalars(select(Project.id).where(Project.name == name))).one_or_none() is not None:
        raise NoSuch(f"there is a project {name!r} already")
    project = Project(id=ids.project_id(), name=name, weight=1.0, created_at=now)
    session.add(project)
    await session.flush()
    audit.note(session, Caller(project, actor, Role.ADMIN), "project.create", project.id, now)
    return project


async def change_project(session: AsyncSession, name: str, changes: Mapping[str, Any], actor: str, now: int) -> None:
    """`changes`: its weight and quotas by column, None for no quota. Raises NoSuch."""
    project = await find_project(session, name)
    await session.execute(update(Project).where(Project.id == project.id).values(**changes))
    audit.note(session, Caller(project, actor, Role.ADMIN), "project.set", project.id, now)


async def create_key(
    session: AsyncSession, project: str, name: str, role: Role, days: int | None, actor: str, now: int
) -> tuple[str, str]:
    """The key's text, which nothing keeps, and its id; `days`: until it expires. Raises NoSuch."""
    owner = await find_project(session, project)
    text, row = new_key(owner.id, name, role, now, now + days * DAY_S if days else None)
    session.add(row)
    audit.note(session, Caller(owner, actor, Role.ADMIN), "key.create", row.id, now)
    return text, row.id


async def revoke_key(session: AsyncSession, key_id: str, actor: str, now: int) -> None:
    """Raises NoSuch for one that is unknown or revoked."""
    good = (ApiKey.id == key_id) & ApiKey.revoked_at.is_(None)
    owner = (
        await session.scalars(select(Project).join(ApiKey, ApiKey.project_id == Project.id).where(good))
    ).one_or_none()
    if owner is None:
        raise NoSuch(f"no key {key_id!r} that is not revoked; `batchweave keys list` shows all")
    await session.execute(update(ApiKey).where(good).values(revoked_at=now))
    audit.note(session, Caller(owner, actor, Role.ADMIN), "key.revoke", key_id, now)
