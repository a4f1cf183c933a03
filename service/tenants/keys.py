"""API keys: 256 random bits, shown once. The database keeps only a digest, from which the key cannot be recovered."""

import hashlib
import secrets
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from service import ids
from service.db.tables import DEFAULT_PROJECT
from service.db.tenant_tables import ApiKey, Project, Role, Tier

PREFIX = "bw-"


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of the API: `actor` is the id of its key, or says how a caller without a key came."""

    project: Project
    actor: str
    role: Role
    name: str = ""  # of the key
    key_tier: Tier | None = None

    def tier(self, asked: Tier | None) -> Tier:
        """Return the class of an online request: the key's or the project's, or a weaker one that it asks for."""
        own = self.key_tier or Tier(self.project.tier)
        return own if asked is None else max(own, asked, key=list(Tier).index)

    @property
    def administers(self) -> bool:
        return self.role in (Role.ADMIN, Role.OPERATOR)

    @property
    def operates(self) -> bool:
        return self.role is Role.OPERATOR


def new_key(
    project_id: str, name: str, role: Role, now: int, expires_at: int | None, tier: Tier | None = None
) -> tuple[str, ApiKey]:
    """Return a new key's text, which is not stored, and its row."""
    text = f"{PREFIX}{secrets.token_urlsafe(32)}"
    row = ApiKey(
        id=ids.key_id(),
        project_id=project_id,
        name=name,
        role=role,
        tier=tier,
        digest=_digest(text),
        created_at=now,
        expires_at=expires_at,
    )
    return text, row


async def caller_of(session: AsyncSession, text: str, now: float) -> Caller | None:
    """Return the caller whose key this is; None if it is unknown, revoked or expired."""
    found = (
        await session.execute(
            select(ApiKey, Project)
            .join(Project, Project.id == ApiKey.project_id)
            .where(ApiKey.digest == _digest(text), ApiKey.revoked_at.is_(None))
        )
    ).one_or_none()
    if found is None or (found[0].expires_at is not None and found[0].expires_at <= now):
        return None
    return Caller(found[1], found[0].id, Role(found[0].role), found[0].name, found[0].tier and Tier(found[0].tier))


async def local_caller(session: AsyncSession) -> Caller:
    """Return the caller that everyone is when the service requires no keys."""
    project = (await session.scalars(select(Project).where(Project.id == DEFAULT_PROJECT))).one()
    return Caller(project, "local", Role.OPERATOR)


def _digest(text: str) -> str:
    """Hash a key, unsalted and fast on purpose: unlike a password, a key cannot be guessed."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
