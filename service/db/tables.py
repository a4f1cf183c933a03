"""Defines the tables of the work: files, batches, slices, webhooks, models, and who runs them.

Times are unix seconds. A request is never a row: it is in the batch's index object. Projects and keys are in
`tenant_tables.py`.
"""

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
    LargeBinary,
    String,
    Text,
    false,
    literal,
    text,
    true,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

FILE_KEEP_S = 30 * 24 * 3600  # how long a batch's files are kept unless the client says otherwise
DEFAULT_PROJECT = "proj_default"  # of all callers when the service requires no keys

# SQLite numbers rows automatically only in a column whose type is exactly INTEGER.
RowId = BigInteger().with_variant(Integer, "sqlite")


def fixed(value: Any) -> BindParameter[Any]:
    """Write a value into the statement itself: SQLite uses a partial index only if it sees the index's condition."""
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
    ANY = "any"  # the order in which answers arrived
    INPUT = "input"  # the order of the requests in the input file


class OnLongLine(StrEnum):
    """Says what happens to a file with a request that is longer than the model's context."""

    FAIL_LINE = "fail_line"  # only that request fails, as in OpenAI's API
    FAIL_FILE = "fail_file"  # nothing runs


class SliceStatus(StrEnum):
    READY = "ready"  # waits for a worker
    LEASED = "leased"  # a worker runs it until lease_until
    DONE = "done"  # its answers are in its shard


class UploadStatus(StrEnum):
    PENDING = "pending"  # accepts parts until it expires
    COMPLETED = "completed"  # its file exists
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class Base(DeclarativeBase):
    pass


class LengthProfile(Base):
    """How long a project's answers were, in earlier batches, to requests that one key stands for."""

    __tablename__ = "length_profiles"
    __table_args__ = (Index("ix_length_profiles_seen", "project_id", "model", "seen_at"),)

    key: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)  # of requests/likeness.py
    project_id: Mapped[str] = mapped_column(String(64))
    model: Mapped[str] = mapped_column(String(512))
    profile: Mapped[str] = mapped_column(Text)  # engine_ext.plan.memory.Profile.text
    seen_at: Mapped[int] = mapped_column(BigInteger)


class DrainedWorker(Base):
    """A worker that takes no new slices until it is resumed. The list of workers itself is in Redis only."""

    __tablename__ = "drained_workers"

    name: Mapped[str] = mapped_column(String(256), primary_key=True)
    since: Mapped[int] = mapped_column(BigInteger)


class FleetOwner(Base):
    """The one row that says which `batchweave fleet` may start and end engines, and until when.

    `namespace`: what tells the engines of this service from those of others on one cluster.
    """

    __tablename__ = "fleet_owner"

    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    namespace: Mapped[str] = mapped_column(String(64))
    owner: Mapped[str] = mapped_column(String(256))
    until: Mapped[float] = mapped_column(Float(53))


class File(Base):
    __tablename__ = "files"
    __table_args__ = (
        Index("ix_files_listed", "project_id", "seq"),
        _partial("ix_files_kept", "expires_at", where="deleted_at IS NULL"),
        _partial("ix_files_counted", "project_id", "size_bytes", where="deleted_at IS NULL"),
        _partial("ix_files_deleted", "deleted_at", where="deleted_at IS NOT NULL"),
    )

    seq: Mapped[int] = mapped_column(RowId, primary_key=True)
    id: Mapped[str] = mapped_column(String(64), unique=True)
    project_id: Mapped[str] = mapped_column(String(64), default=DEFAULT_PROJECT, server_default=DEFAULT_PROJECT)
    purpose: Mapped[str] = mapped_column(String(32))
    filename: Mapped[str] = mapped_column(String(1024))
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[int] = mapped_column(BigInteger)
    expires_at: Mapped[int | None] = mapped_column(BigInteger)
    deleted_at: Mapped[int | None] = mapped_column(BigInteger)  # the row stays, so that a listing can continue after it


class Upload(Base):
    """A file that is uploaded in parts."""

    __tablename__ = "uploads"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    project_id: Mapped[str] = mapped_column(String(64), index=True)
    purpose: Mapped[str] = mapped_column(String(32))
    filename: Mapped[str] = mapped_column(String(1024))
    size_bytes: Mapped[int] = mapped_column(BigInteger)  # as announced; the parts must add up to it
    keep_s: Mapped[int] = mapped_column(BigInteger)  # how long the file is kept once it is complete
    status: Mapped[UploadStatus] = mapped_column(String(16), index=True)
    file_id: Mapped[str | None] = mapped_column(String(64), index=True)
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
        Index("ix_batches_listed", "project_id", "seq"),
        Index("ix_batches_idempotency_key", "project_id", "idempotency_key", unique=True),
        Index("ix_batches_asked", "asked"),
        Index("ix_batches_error_file", "error_file_id"),
        Index("ix_batches_output_file", "output_file_id"),
        Index("ix_batches_ended", "ended_at"),
        # Indexes for what the planner role polls for; none of them grows with finished batches.
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
        _partial("ix_batches_without_index", "seq", where="status = 'in_progress' AND index_id IS NULL"),
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
    asked: Mapped[str | None] = mapped_column(String(64))  # digest of the request body that created it
    output_order: Mapped[OutputOrder] = mapped_column(String(8), default=OutputOrder.ANY, server_default="any")
    on_long_line: Mapped[OnLongLine] = mapped_column(
        String(16), default=OnLongLine.FAIL_LINE, server_default="fail_file"
    )
    # requests/accept.py; null is every answer.
    accept: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    deleted_at: Mapped[int | None] = mapped_column(BigInteger)  # only after it has ended; the row stays for a while
    retry_of: Mapped[str | None] = mapped_column(String(64))  # run only some requests of this batch of the same input
    # Which ones, by the outcomes of their answers; null is those that failed.
    retry_outcomes: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    max_tokens: Mapped[int | None] = mapped_column(BigInteger)  # of each answer, whatever its request says
    model: Mapped[str | None] = mapped_column(String(512))  # the base model, whose workers run the batch
    adapter: Mapped[str | None] = mapped_column(String(512))  # of that model, if the requests name one
    index_id: Mapped[str | None] = mapped_column(String(64))  # of the index that its validation wrote
    index_bytes: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    validating_until: Mapped[float | None] = mapped_column(Float(53))  # extended while validation runs
    validation_deaths: Mapped[int] = mapped_column(Integer, default=0, server_default="0")  # of its validators
    errors: Mapped[list[dict[str, Any]] | None] = mapped_column(JSON)
    causes: Mapped[list[dict[str, Any]] | None] = mapped_column(JSON)  # why requests failed, the most frequent first
    unknown_parameters: Mapped[list[dict[str, Any]] | None] = mapped_column(JSON(none_as_null=True))
    unknown_fields: Mapped[list[dict[str, Any]] | None] = mapped_column(JSON(none_as_null=True))  # of its create
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
    ended_at: Mapped[int | None] = mapped_column(BigInteger)  # when it reached its final state

    held: Mapped[bool] = mapped_column(Boolean, default=False, server_default=false())  # until it is started
    preview: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))  # its plan, made while it is held
    total: Mapped[int] = mapped_column(BigInteger, default=0)  # requests in the file
    prompt_tokens: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")  # of all requests
    planned: Mapped[int] = mapped_column(BigInteger, default=0)  # the first so many requests are in a window
    # The cost model's estimates for the planned requests; the cost of a shared prefix is split equally.
    planned_compute_s: Mapped[float] = mapped_column(Float(53), default=0.0, server_default="0")
    planned_memory_s: Mapped[float] = mapped_column(Float(53), default=0.0, server_default="0")
    planned_output_tokens: Mapped[float] = mapped_column(Float(53), default=0.0, server_default="0")
    slices: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")  # slices with requests of this batch
    slices_left: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")  # those not done yet
    urgent_at: Mapped[float | None] = mapped_column(Float(53))  # when the rest must start to end in time: urgency.py
    # Counts of done slices, added as each one finishes; once the batch has ended, counts of its files. The counts of
    # running slices are in Redis.
    completed: Mapped[int] = mapped_column(BigInteger, default=0)
    failed: Mapped[int] = mapped_column(BigInteger, default=0)
    input_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    cached_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    output_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    reasoning_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    cut_off: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    cut_off_tokens: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    invalid: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    refused: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    looped: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    not_accepted: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")  # of those that failed


class WebhookEndpoint(Base):
    """A URL that is notified of a project's batches. Secrets are sealed (webhooks/secrets.py); old ones may not be."""

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
    busy_until: Mapped[float | None] = mapped_column(Float(53))  # set while a delivery to it is under way
    rests_until: Mapped[float | None] = mapped_column(Float(53))  # no deliveries until then, after failed ones
    served_at: Mapped[float] = mapped_column(Float(53), default=0.0, server_default="0")  # start of its last delivery
    failures: Mapped[int] = mapped_column(Integer, default=0, server_default="0")  # failed deliveries in a row
    last_result: Mapped[str | None] = mapped_column(String(200))
    created_at: Mapped[int] = mapped_column(BigInteger)
    updated_at: Mapped[int] = mapped_column(BigInteger)
    deleted_at: Mapped[int | None] = mapped_column(BigInteger)


class WebhookDelivery(Base):
    """An event to deliver to an endpoint; `next_at` is null once it is delivered or given up."""

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
    """A planning window: requests that are planned together. `id` grows."""

    __tablename__ = "windows"

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    model: Mapped[str] = mapped_column(String(512))
    plan_id: Mapped[str] = mapped_column(String(64), unique=True)
    # Whether its picture may show texts of requests; false: these are to be deleted, null: they are.
    texts: Mapped[bool | None] = mapped_column(Boolean, default=True, server_default=true())
    created_at: Mapped[int] = mapped_column(BigInteger)


class Slice(Base):
    """A part of a window's order. A `ready` row is to be announced; Redis only holds hints.

    A slice has the `count` requests from `first` on until its worker hands some over. Then `offsets` says which it has,
    counted from `first`, as little-endian uint32.
    """

    __tablename__ = "slices"
    __table_args__ = (_partial("ix_slices_leased", "lease_until", where="status = 'leased'"),)

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    window_id: Mapped[int] = mapped_column(ForeignKey("windows.id"), index=True)
    model: Mapped[str] = mapped_column(String(512))
    first: Mapped[int] = mapped_column(BigInteger)  # first position in the window's order
    count: Mapped[int] = mapped_column(BigInteger)
    offsets: Mapped[bytes | None] = mapped_column(LargeBinary)
    status: Mapped[SliceStatus] = mapped_column(String(16), default=SliceStatus.READY)
    owner: Mapped[str | None] = mapped_column(String(256))  # the worker that runs it, or that finished it
    epoch: Mapped[int] = mapped_column(BigInteger, default=0)  # grows with each lease; an older one is refused
    lease_until: Mapped[float | None] = mapped_column(Float(53))
    # How many segments its shard has, as pairs of an epoch and a number, None where an owner never said; epochs without
    # segments are left out, but for the last one (`objects/shards.py`).
    segments: Mapped[list[list[int | None]] | None] = mapped_column(JSON(none_as_null=True))
    # `deaths`: leases that ended because the worker died. From the second on the slice runs alone, `trial` requests at
    # a time, from `trial_place` on, in the lease `trial_epoch`. `alone_deaths`: deaths with one request alone in the
    # engine, which has therefore caused them.
    deaths: Mapped[int] = mapped_column(Integer, default=0, server_default="0")
    trial: Mapped[int | None] = mapped_column(BigInteger)
    trial_place: Mapped[int | None] = mapped_column(BigInteger)
    trial_epoch: Mapped[int | None] = mapped_column(BigInteger)
    alone_deaths: Mapped[int] = mapped_column(Integer, default=0, server_default="0")


class SliceBatch(Base):
    """A batch's share of a slice; the counts are set when it is done.

    `status` is that of the slice, so that a batch's ready slices are found without reading the others; a share is done
    once its own requests are answered.
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
    """A run of a slice's segments that became readable together while the batch was running; ordered by `number`.

    `repeats`: requests that an earlier run of the slice already has.
    """

    __tablename__ = "early_runs"

    batch_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    number: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    slice_id: Mapped[int] = mapped_column(BigInteger)
    segments: Mapped[list[str]] = mapped_column(JSON)
    repeats: Mapped[list[int]] = mapped_column(JSON)
    output_bytes: Mapped[int] = mapped_column(BigInteger)  # of its lines in the output file, line feeds included
    error_bytes: Mapped[int] = mapped_column(BigInteger)


class Model(Base):
    """A model that a planner or worker of this service was started with."""

    __tablename__ = "models"

    name: Mapped[str] = mapped_column(String(512), primary_key=True)
    source: Mapped[str] = mapped_column(String(4096))  # local path or hub id
    context_length: Mapped[int | None] = mapped_column(BigInteger)  # in tokens; set by a worker
    endpoints: Mapped[list[str] | None] = mapped_column(JSON)  # endpoints that it serves; set by a worker
    # Of the worker that started last: what finds tool calls and thoughts in its answers, "" if nothing does; None if
    # unknown.
    tool_parser: Mapped[str | None] = mapped_column(String(64))
    reasoning_parser: Mapped[str | None] = mapped_column(String(64))
    # Of the worker that started last: `gpu`, a preset's name or a calibration, and `tp`, how many of them it has.
    machine: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    created_at: Mapped[int] = mapped_column(BigInteger)
