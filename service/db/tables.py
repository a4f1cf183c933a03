"""The tables. Times are unix seconds; a request is never a row: its place is in the batch's index object."""

from enum import StrEnum
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    BindParameter,
    Boolean,
    Float,
    ForeignKey,
    Index,
    Integer,
    String,
    false,
    literal,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

FILE_KEEP_S = 30 * 24 * 3600  # how long a batch's files are kept unless the client says otherwise
DEFAULT_PROJECT = "proj_default"  # of all callers where no keys are asked for

# SQLite numbers rows by itself only in a column that is INTEGER to the letter.
RowId = BigInteger().with_variant(Integer, "sqlite")


def fixed(value: Any) -> BindParameter[Any]:
    """Write a value into the statement itself: SQLite uses a partial index only where it sees the index's condition."""
    return literal(value, literal_execute=True)


def _partial(name: str, *columns: str, where: str) -> Index:
    return Index(name, *columns, sqlite_where=text(where), postgresql_where=text(where))


class BatchStatus(StrEnum):
    VALIDATING = "validating"  # the validator reads the file
    FAILED = "failed"  # the file has errors; nothing ran
    IN_PROGRESS = "in_progress"  # requests are planned and run
    FINALIZING = "finalizing"  # every answer is in, or time is up: files are written
    COMPLETED = "completed"  # every request has its line
    EXPIRED = "expired"  # the completion window closed; finished lines are kept
    CANCELLING = "cancelling"  # asked to stop; files are written
    CANCELLED = "cancelled"  # stopped; finished lines are kept


class OutputOrder(StrEnum):
    ANY = "any"  # as answers came
    INPUT = "input"  # as the requests stand in the input file


class OnLongLine(StrEnum):
    """What becomes of a file with a request that is longer than the model's context."""

    FAIL_FILE = "fail_file"  # nothing runs, as OpenAI's API does it
    FAIL_LINE = "fail_line"  # that request fails


class SliceStatus(StrEnum):
    READY = "ready"  # waits for a worker
    LEASED = "leased"  # a worker runs it until lease_until
    DONE = "done"  # its answers are in its shard


class UploadStatus(StrEnum):
    PENDING = "pending"  # takes parts until it expires
    COMPLETED = "completed"  # its file is there
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class Role(StrEnum):
    USER = "user"  # files, uploads and batches of its project
    ADMIN = "admin"  # its webhooks too
    MONITOR = "monitor"  # figures of the whole service and its workers, and nothing of any project
    OPERATOR = "operator"  # the workers and figures, and in the dashboard every project, its keys and quotas


class Base(DeclarativeBase):
    pass


class Project(Base):
    """Who owns files and batches. Without a quota (null) only the deployment's limits hold."""

    __tablename__ = "projects"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    name: Mapped[str] = mapped_column(String(128), unique=True)
    weight: Mapped[float] = mapped_column(Float(53), default=1.0)  # share of the work, beside other projects that wait
    max_enqueued_tokens: Mapped[int | None] = mapped_column(BigInteger)  # prompt tokens of batches that have not ended
    max_batches: Mapped[int | None] = mapped_column(BigInteger)  # that have not ended
    max_bytes: Mapped[int | None] = mapped_column(BigInteger)  # of all files
    max_requests_per_minute: Mapped[int | None] = mapped_column(BigInteger)  # to the API
    created_at: Mapped[int] = mapped_column(BigInteger)


class ApiKey(Base):
    """A key is shown once, when it is made; here is only its digest."""

    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    name: Mapped[str] = mapped_column(String(128))
    role: Mapped[Role] = mapped_column(String(16))
    digest: Mapped[str] = mapped_column(String(64), unique=True)
    created_at: Mapped[int] = mapped_column(BigInteger)
    expires_at: Mapped[int | None] = mapped_column(BigInteger)
    revoked_at: Mapped[int | None] = mapped_column(BigInteger)


class AuditEvent(Base):
    """Who changed what; written in the transaction of the change."""

    __tablename__ = "audit_events"

    seq: Mapped[int] = mapped_column(RowId, primary_key=True)
    at: Mapped[int] = mapped_column(BigInteger)
    project_id: Mapped[str] = mapped_column(String(64), index=True)
    actor: Mapped[str] = mapped_column(String(64))  # id of the key, or how it came without one
    action: Mapped[str] = mapped_column(String(64))
    object_id: Mapped[str] = mapped_column(String(64))
    detail: Mapped[str] = mapped_column(String(512), default="", server_default="")  # what changed, in words


class DashboardSession(Base):
    """A browser that signed in with a key; it ends with the key. `digest`: of the token in its cookie."""

    __tablename__ = "dashboard_sessions"

    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    key_id: Mapped[str] = mapped_column(String(64))
    expires_at: Mapped[int] = mapped_column(BigInteger)


class DrainedWorker(Base):
    """A worker that takes no new slices until it is resumed; workers themselves are known to Redis alone."""

    __tablename__ = "drained_workers"

    name: Mapped[str] = mapped_column(String(256), primary_key=True)
    since: Mapped[int] = mapped_column(BigInteger)


class File(Base):
    __tablename__ = "files"
    __table_args__ = (_partial("ix_files_kept", "expires_at", where="deleted_at IS NULL"),)

    seq: Mapped[int] = mapped_column(RowId, primary_key=True)
    id: Mapped[str] = mapped_column(String(64), unique=True)
    project_id: Mapped[str] = mapped_column(
        String(64), index=True, default=DEFAULT_PROJECT, server_default=DEFAULT_PROJECT
    )
    purpose: Mapped[str] = mapped_column(String(32))
    filename: Mapped[str] = mapped_column(String(1024))
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[int] = mapped_column(BigInteger)
    expires_at: Mapped[int | None] = mapped_column(BigInteger)
    deleted_at: Mapped[int | None] = mapped_column(BigInteger)  # the row stays, so that a page can go on behind it


class Upload(Base):
    """A file that comes in parts."""

    __tablename__ = "uploads"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    project_id: Mapped[str] = mapped_column(String(64), index=True)
    purpose: Mapped[str] = mapped_column(String(32))
    filename: Mapped[str] = mapped_column(String(1024))
    size_bytes: Mapped[int] = mapped_column(BigInteger)  # as announced; the parts must add up to it
    keep_s: Mapped[int] = mapped_column(BigInteger)  # how long the file is kept once it is complete
    status: Mapped[UploadStatus] = mapped_column(String(16), index=True)
    file_id: Mapped[str | None] = mapped_column(String(64))
    created_at: Mapped[int] = mapped_column(BigInteger)
    expires_at: Mapped[int] = mapped_column(BigInteger)


class UploadPart(Base):
    __tablename__ = "upload_parts"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    upload_id: Mapped[str] = mapped_column(ForeignKey("uploads.id"), index=True)
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[int] = mapped_column(BigInteger)


class Batch(Base):
    __tablename__ = "batches"
    __table_args__ = (
        Index("ix_batches_status", "status"),
        Index("ix_batches_project", "project_id", "status"),
        Index("ix_batches_idempotency_key", "project_id", "idempotency_key", unique=True),
        Index("ix_batches_asked", "asked"),
        Index("ix_batches_ended", "ended_at"),
        # What the planner role looks for again and again; none of them grows with batches that have ended.
        _partial("ix_batches_validating", "project_id", "expires_at", "seq", where="status = 'validating'"),
        _partial(
            "ix_batches_unplanned",
            *("project_id", "expires_at", "seq"),
            where="status = 'in_progress' AND planned < total",
        ),
        _partial(
            "ix_batches_urgent",
            *("model", "project_id", "urgent_at"),
            where="status = 'in_progress' AND slices_left > 0",
        ),
        _partial("ix_batches_done", "seq", where="status = 'in_progress' AND slices_left = 0 AND planned = total"),
        _partial("ix_batches_closing", "expires_at", where="status IN ('validating', 'in_progress')"),
    )

    seq: Mapped[int] = mapped_column(RowId, primary_key=True)
    id: Mapped[str] = mapped_column(String(64), unique=True)
    project_id: Mapped[str] = mapped_column(String(64), default=DEFAULT_PROJECT, server_default=DEFAULT_PROJECT)
    status: Mapped[BatchStatus] = mapped_column(String(16))
    endpoint: Mapped[str] = mapped_column(String(64))
    input_file_id: Mapped[str] = mapped_column(String(64), index=True)
    completion_window: Mapped[str] = mapped_column(String(16))
    custom_metadata: Mapped[dict[str, str] | None] = mapped_column("metadata", JSON)
    output_expires_after_s: Mapped[int | None] = mapped_column(BigInteger)
    idempotency_key: Mapped[str | None] = mapped_column(String(255))
    asked: Mapped[str | None] = mapped_column(String(64))  # digest of the body that created it
    output_order: Mapped[OutputOrder] = mapped_column(String(8), default=OutputOrder.ANY, server_default="any")
    on_long_line: Mapped[OnLongLine] = mapped_column(
        String(16), default=OnLongLine.FAIL_FILE, server_default="fail_file"
    )
    retry_of: Mapped[str | None] = mapped_column(String(64))  # only what failed in this batch of the same input
    model: Mapped[str | None] = mapped_column(String(512))
    index_id: Mapped[str | None] = mapped_column(String(64))  # of the validation that counted: where its index is
    index_bytes: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    validating_until: Mapped[float | None] = mapped_column(Float(53))  # unless who validates it says so again
    validation_deaths: Mapped[int] = mapped_column(Integer, default=0, server_default="0")  # of who validated it
    errors: Mapped[list[dict[str, Any]] | None] = mapped_column(JSON)
    causes: Mapped[list[dict[str, Any]] | None] = mapped_column(JSON)  # of failed requests, the most frequent first
    output_file_id: Mapped[str | None] = mapped_column(String(64))
    error_file_id: Mapped[str | None] = mapped_column(String(64))

    created_at: Mapped[int] = mapped_column(BigInteger)
    expires_at: Mapped[int] = mapped_column(BigInteger)
    in_progress_at: Mapped[int | None] = mapped_column(BigInteger)
    finalizing_at: Mapped[int | None] = mapped_column(BigInteger)
    completed_at: Mapped[int | None] = mapped_column(BigInteger)
    failed_at: Mapped[int | None] = mapped_column(BigInteger)
    expired_at: Mapped[int | None] = mapped_column(BigInteger)
    cancelling_at: Mapped[int | None] = mapped_column(BigInteger)
    cancelled_at: Mapped[int | None] = mapped_column(BigInteger)
    ended_at: Mapped[int | None] = mapped_column(BigInteger)  # whichever of these ended it

    held: Mapped[bool] = mapped_column(Boolean, default=False, server_default=false())  # until somebody starts it
    preview: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))  # its plan, made while it is held
    total: Mapped[int] = mapped_column(BigInteger, default=0)  # requests in the file
    prompt_tokens: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")  # of all of them
    planned: Mapped[int] = mapped_column(BigInteger, default=0)  # of these, the first so many are in a window
    # Of those in a window, as the cost model sees them; shared prefixes in equal parts.
    planned_compute_s: Mapped[float] = mapped_column(Float(53), default=0.0, server_default="0")
    planned_memory_s: Mapped[float] = mapped_column(Float(53), default=0.0, server_default="0")
    planned_output_tokens: Mapped[float] = mapped_column(Float(53), default=0.0, server_default="0")
    slices: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")  # that have a part of it
    slices_left: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")  # of these, not done
    urgent_at: Mapped[float | None] = mapped_column(Float(53))  # when the rest must run to end in time; see urgency.py
    # Of done slices, added when each is finished; of the files, once the batch has ended. Of slices that run: in Redis.
    completed: Mapped[int] = mapped_column(BigInteger, default=0)
    failed: Mapped[int] = mapped_column(BigInteger, default=0)
    input_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    cached_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    output_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    reasoning_tokens: Mapped[int] = mapped_column(BigInteger, default=0)


class WebhookEndpoint(Base):
    """Where a project is told of its batches. Secrets are sealed (webhooks/secrets.py); older ones as they are."""

    __tablename__ = "webhook_endpoints"

    seq: Mapped[int] = mapped_column(RowId, primary_key=True)
    id: Mapped[str] = mapped_column(String(64), unique=True)
    project_id: Mapped[str] = mapped_column(String(64), index=True)
    name: Mapped[str] = mapped_column(String(256))
    url: Mapped[str] = mapped_column(String(2048))
    event_types: Mapped[list[str]] = mapped_column(JSON)
    secret: Mapped[str] = mapped_column(String(512))
    old_secret: Mapped[str | None] = mapped_column(String(512))
    old_secret_until: Mapped[int | None] = mapped_column(BigInteger)
    busy_until: Mapped[float | None] = mapped_column(Float(53))  # while a delivery to it is under way
    rests_until: Mapped[float | None] = mapped_column(Float(53))  # after deliveries that failed
    served_at: Mapped[float] = mapped_column(Float(53), default=0.0, server_default="0")  # when one last began
    failures: Mapped[int] = mapped_column(Integer, default=0, server_default="0")  # deliveries since one arrived
    last_result: Mapped[str | None] = mapped_column(String(200))
    created_at: Mapped[int] = mapped_column(BigInteger)
    updated_at: Mapped[int] = mapped_column(BigInteger)
    deleted_at: Mapped[int | None] = mapped_column(BigInteger)


class WebhookDelivery(Base):
    """An event on its way; `next_at` is null once it is delivered or given up."""

    __tablename__ = "webhook_deliveries"
    __table_args__ = (Index("ix_webhook_deliveries_due", "endpoint_id", "next_at"),)

    seq: Mapped[int] = mapped_column(RowId, primary_key=True)
    id: Mapped[str] = mapped_column(String(64))
    endpoint_id: Mapped[str] = mapped_column(String(64))
    type: Mapped[str] = mapped_column(String(64))
    batch_id: Mapped[str] = mapped_column(String(64))
    attempts: Mapped[int] = mapped_column(Integer, default=0)
    next_at: Mapped[float | None] = mapped_column(Float(53), index=True)
    result: Mapped[str | None] = mapped_column(String(200))  # of the last attempt
    created_at: Mapped[int] = mapped_column(BigInteger)


class Window(Base):
    """Requests planned together; `id` grows."""

    __tablename__ = "windows"

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    model: Mapped[str] = mapped_column(String(512))
    plan_id: Mapped[str] = mapped_column(String(64), unique=True)
    created_at: Mapped[int] = mapped_column(BigInteger)


class Slice(Base):
    """A run of the window's order. A row that is `ready` is to be announced: Redis is only told of it."""

    __tablename__ = "slices"
    __table_args__ = (_partial("ix_slices_leased", "lease_until", where="status = 'leased'"),)

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    window_id: Mapped[int] = mapped_column(ForeignKey("windows.id"), index=True)
    model: Mapped[str] = mapped_column(String(512))
    first: Mapped[int] = mapped_column(BigInteger)  # position in the window's order
    count: Mapped[int] = mapped_column(BigInteger)
    status: Mapped[SliceStatus] = mapped_column(String(16), default=SliceStatus.READY)
    owner: Mapped[str | None] = mapped_column(String(256))
    epoch: Mapped[int] = mapped_column(BigInteger, default=0)  # grows with each lease; an older one is refused
    lease_until: Mapped[float | None] = mapped_column(Float(53))
    # Leases that ended by a death. From the second on the slice runs alone, so many requests at a time as `trial` says,
    # from the place `trial_place`, in the lease `trial_epoch`; `alone_deaths` of one by itself are its own doing.
    deaths: Mapped[int] = mapped_column(Integer, default=0, server_default="0")
    trial: Mapped[int | None] = mapped_column(BigInteger)
    trial_place: Mapped[int | None] = mapped_column(BigInteger)
    trial_epoch: Mapped[int | None] = mapped_column(BigInteger)
    alone_deaths: Mapped[int] = mapped_column(Integer, default=0, server_default="0")


class SliceBatch(Base):
    """How much of a slice belongs to a batch; the counts are set when the slice is done.

    `status` is that of the slice, moved with it: a batch's ready slices are found without looking at the others.
    """

    __tablename__ = "slice_batches"
    __table_args__ = (
        Index("ix_slice_batches_batch", "batch_id"),
        _partial("ix_slice_batches_ready", "batch_id", "slice_id", where="status = 'ready'"),
        _partial("ix_slice_batches_leased", "batch_id", "slice_id", where="status = 'leased'"),
    )

    slice_id: Mapped[int] = mapped_column(ForeignKey("slices.id"), primary_key=True)
    batch_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    status: Mapped[SliceStatus] = mapped_column(String(16), default=SliceStatus.READY, server_default="ready")
    total: Mapped[int] = mapped_column(BigInteger)
    completed: Mapped[int] = mapped_column(BigInteger, default=0)
    failed: Mapped[int] = mapped_column(BigInteger, default=0)


class EarlyRun(Base):
    """Segments of a slice that became readable together while the batch ran; in the order of their numbers.

    `repeats`: requests that an earlier run of the slice has already.
    """

    __tablename__ = "early_runs"

    batch_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    number: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    slice_id: Mapped[int] = mapped_column(BigInteger)
    segments: Mapped[list[str]] = mapped_column(JSON)
    repeats: Mapped[list[int]] = mapped_column(JSON)
    output_bytes: Mapped[int] = mapped_column(BigInteger)  # of lines of the output file, line feeds included
    error_bytes: Mapped[int] = mapped_column(BigInteger)


class Model(Base):
    """A model that a planner or worker of this service was started with."""

    __tablename__ = "models"

    name: Mapped[str] = mapped_column(String(512), primary_key=True)
    source: Mapped[str] = mapped_column(String(4096))  # local path or hub id
    context_length: Mapped[int | None] = mapped_column(BigInteger)  # tokens; a worker says it
    endpoints: Mapped[list[str] | None] = mapped_column(JSON)  # what it can be asked for; a worker says it
    created_at: Mapped[int] = mapped_column(BigInteger)
