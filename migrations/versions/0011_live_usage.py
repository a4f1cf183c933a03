"""Add the tokens of a slice's answers by batch, so that usage is known while a batch is running."""

from alembic import op
import sqlalchemy as sa


revision = "0011"
down_revision = "0010"

NAMES = ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")


def upgrade() -> None:
    with op.batch_alter_table("slice_batches") as table:
        for name in NAMES:
            table.add_column(sa.Column(name, sa.BigInteger(), nullable=False, server_default="0"))


def downgrade() -> None:
    with op.batch_alter_table("slice_batches") as table:
        for name in NAMES:
            table.drop_column(name)
