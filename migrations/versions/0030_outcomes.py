"""Let a batch's row count the outcomes of its answers."""

from alembic import op
import sqlalchemy as sa


revision = "0030"
down_revision = "0029"
NAMES = ("cut_off", "cut_off_tokens", "invalid", "refused")


def upgrade() -> None:
    for name in NAMES:
        op.add_column("batches", sa.Column(name, sa.BigInteger, nullable=False, server_default="0"))


def downgrade() -> None:
    for name in NAMES:
        op.drop_column("batches", name)
