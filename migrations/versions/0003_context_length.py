"""Add the context length of each model."""

from alembic import op
import sqlalchemy as sa


revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    with op.batch_alter_table("models", schema=None) as batch_op:
        batch_op.add_column(sa.Column("context_length", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("models", schema=None) as batch_op:
        batch_op.drop_column("context_length")
