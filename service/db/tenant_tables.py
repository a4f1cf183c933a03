"""Defines the tables of those who ask: projects, their keys, sessions, and what each has changed."""

from enum import StrEnum

from sqlalchemy import BigInteger, Boolean, Float, ForeignKey, String, true
from sqlalchemy.orm import Mapped, mapped_column

from service.db.tables import Base, RowId


class Role(StrEnum):
    USER = "user"  # may use files, uploads and batches of its project
    ADMIN = "admin"  # may also use its webhooks
    MONITOR = "monitor"  # may read metrics of the service and its workers, but nothing of any project
    OPERATOR = "operator"  # may use workers, metrics and, in the dashboard, all projects, keys and quotas


class Tier(StrEnum):
    """The classes of online requests, by OpenAI's service tiers; the strongest first."""

    PRIORITY = "priority"
    DEFAULT = "default"
    FLEX = "flex"


class Project(Base):
    """A project, which owns files and batches. Without a quota (null) only the deployment's limits apply."""

    __tablename__ = "projects"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    name: Mapped[str] = mapped_column(String(128), unique=True)
    weight: Mapped[float] = mapped_column(Float(53), default=1.0)  # share of the work, relative to waiting projects
    max_enqueued_tokens: Mapped[int | None] = mapped_column(BigInteger)  # prompt tokens of unfinished batches
    max_batches: Mapped[int | None] = mapped_column(BigInteger)  # unfinished ones
    max_bytes: Mapped[int | None] = mapped_column(BigInteger)  # of files, pending uploads and indexes
    max_requests_per_minute: Mapped[int | None] = mapped_column(BigInteger)  # to the API
    tier: Mapped[Tier] = mapped_column(String(16), default=Tier.DEFAULT, server_default=Tier.DEFAULT)  # the strongest
    remembers_lengths: Mapped[bool] = mapped_column(Boolean, default=True, server_default=true())
    created_at: Mapped[int] = mapped_column(BigInteger)


class ApiKey(Base):
    """An API key: shown once, when it is created; only its digest is stored."""

    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    name: Mapped[str] = mapped_column(String(128))
    role: Mapped[Role] = mapped_column(String(16))
    tier: Mapped[Tier | None] = mapped_column(String(16))  # null: the project's
    digest: Mapped[str] = mapped_column(String(64), unique=True)
    created_at: Mapped[int] = mapped_column(BigInteger)
    expires_at: Mapped[int | None] = mapped_column(BigInteger)
    revoked_at: Mapped[int | None] = mapped_column(BigInteger)


class AuditEvent(Base):
    """A line of the audit log: who changed what. It is written in the transaction of the change."""

    __tablename__ = "audit_events"

    seq: Mapped[int] = mapped_column(RowId, primary_key=True)
    at: Mapped[int] = mapped_column(BigInteger)
    project_id: Mapped[str] = mapped_column(String(64), index=True)
    actor: Mapped[str] = mapped_column(String(64))  # id of the key, or how the caller came without one
    action: Mapped[str] = mapped_column(String(64))
    object_id: Mapped[str] = mapped_column(String(64))
    detail: Mapped[str] = mapped_column(String(512), default="", server_default="")  # what changed, in words


class DashboardSession(Base):
    """A browser session that was opened with a key and ends with it. `digest`: of the token in its cookie."""

    __tablename__ = "dashboard_sessions"

    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    key_id: Mapped[str] = mapped_column(String(64))
    expires_at: Mapped[int] = mapped_column(BigInteger)
