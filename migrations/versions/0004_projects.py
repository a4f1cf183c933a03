"""Add projects, which own files and batches, their API keys and the audit log."""

import time

from alembic import op
import sqlalchemy as sa


revision = "0004"
down_revision = "0003"

DEFAULT = "proj_default"
ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    projects = op.create_table(
        "projects",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("weight", sa.Float(precision=53), nullable=False),
        sa.Column("max_enqueued_tokens", sa.BigInteger(), nullable=True),
        sa.Column("max_batches", sa.BigInteger(), nullable=True),
        sa.Column("max_bytes", sa.BigInteger(), nullable=True),
        sa.Column("max_requests_per_minute", sa.BigInteger(), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("name"),
    )
    op.bulk_insert(projects, [{"id": DEFAULT, "name": "default", "weight": 1.0, "created_at": int(time.time())}])
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("project_id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=True),
        sa.Column("revoked_at", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"]),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("digest"),
    )
    op.create_table(
        "audit_events",
        sa.Column("seq", ROW_ID, nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("project_id", sa.String(length=64), nullable=False),
        sa.Column("actor", sa.String(length=64), nullable=False),
        sa.Column("action", sa.String(length=64), nullable=False),
        sa.Column("object_id", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("seq"),
    )
    op.create_index("ix_audit_events_project_id", "audit_events", ["project_id"])
    owner = sa.Column("project_id", sa.String(length=64), nullable=False, server_default=DEFAULT)
    with op.batch_alter_table("files", schema=None) as batch_op:
        batch_op.add_column(owner.copy())
        batch_op.create_index("ix_files_project_id", ["project_id"])
    with op.batch_alter_table("batches", schema=None) as batch_op:
        batch_op.add_column(owner.copy())
        batch_op.add_column(sa.Column("prompt_tokens", sa.BigInteger(), nullable=False, server_default="0"))
        batch_op.drop_index("ix_batches_idempotency_key")
        batch_op.create_index("ix_batches_idempotency_key", ["project_id", "idempotency_key"], unique=True)
        batch_op.create_index("ix_batches_project", ["project_id", "status"])


def downgrade() -> None:
    with op.batch_alter_table("batches", schema=None) as batch_op:
        batch_op.drop_index("ix_batches_project")
        batch_op.drop_index("ix_batches_idempotency_key")
        batch_op.create_index("ix_batches_idempotency_key", ["idempotency_key"], unique=True)
        batch_op.drop_column("prompt_tokens")
        batch_op.drop_column("project_id")
    with op.batch_alter_table("files", schema=None) as batch_op:
        batch_op.drop_index("ix_files_project_id")
        batch_op.drop_column("project_id")
    op.drop_table("audit_events")
    op.drop_table("api_keys")
    op.drop_table("projects")
