"""Add the output order, retries of failed requests, causes of failures and the planner's estimates."""

from alembic import op
import sqlalchemy as sa


revision = "0006"
down_revision = "0005"

PLANNED = ("planned_compute_s", "planned_memory_s", "planned_output_tokens")


def upgrade() -> None:
    with op.batch_alter_table("batches", schema=None) as batch_op:
        batch_op.add_column(sa.Column("output_order", sa.String(length=8), nullable=False, server_default="any"))
        batch_op.add_column(sa.Column("retry_of", sa.String(length=64), nullable=True))
        batch_op.add_column(sa.Column("causes", sa.JSON(), nullable=True))
        for name in PLANNED:
            batch_op.add_column(sa.Column(name, sa.Float(precision=53), nullable=False, server_default="0"))


def downgrade() -> None:
    with op.batch_alter_table("batches", schema=None) as batch_op:
        for name in (*PLANNED, "causes", "retry_of", "output_order"):
            batch_op.drop_column(name)
