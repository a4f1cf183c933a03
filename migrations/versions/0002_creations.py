"""Add the columns that recognize a retried creation of a batch."""

from alembic import op
import sqlalchemy as sa


revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    with op.batch_alter_table("batches", schema=None) as batch_op:
        batch_op.add_column(sa.Column("idempotency_key", sa.String(length=255), nullable=True))
        batch_op.add_column(sa.Column("asked", sa.String(length=64), nullable=True))
        batch_op.create_index("ix_batches_idempotency_key", ["idempotency_key"], unique=True)
        batch_op.create_index("ix_batches_asked", ["asked"], unique=False)


def downgrade() -> None:
    with op.batch_alter_table("batches", schema=None) as batch_op:
        batch_op.drop_index("ix_batches_asked")
        batch_op.drop_index("ix_batches_idempotency_key")
        batch_op.drop_column("asked")
        batch_op.drop_column("idempotency_key")
