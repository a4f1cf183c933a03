"""Let a batch count loops, and retry requests by the outcomes of their answers, with another limit of tokens."""

from alembic import op
import sqlalchemy as sa


revision = "0031"
down_revision = "0030"


def upgrade() -> None:
    op.add_column("batches", sa.Column("looped", sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("batches", sa.Column("retry_outcomes", sa.JSON))
    op.add_column("batches", sa.Column("max_tokens", sa.BigInteger))
    op.create_index("ix_batches_output_file", "batches", ["output_file_id"])


def downgrade() -> None:
    op.drop_index("ix_batches_output_file", "batches")
    op.drop_column("batches", "max_tokens")
    op.drop_column("batches", "retry_outcomes")
    op.drop_column("batches", "looped")
