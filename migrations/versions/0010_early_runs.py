"""Add the answers that are readable while a batch is running."""

from alembic import op
import sqlalchemy as sa


revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.create_table(
        "early_runs",
        sa.Column("batch_id", sa.String(length=64), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("slice_id", sa.BigInteger(), nullable=False),
        sa.Column("segments", sa.JSON(), nullable=False),
        sa.Column("repeats", sa.JSON(), nullable=False),
        sa.Column("output_bytes", sa.BigInteger(), nullable=False),
        sa.Column("error_bytes", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("batch_id", "number"),
    )


def downgrade() -> None:
    op.drop_table("early_runs")
