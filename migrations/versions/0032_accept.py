"""Let a batch say which answers it accepts."""

from alembic import op
import sqlalchemy as sa


revision = "0032"
down_revision = "0031"


def upgrade() -> None:
    op.add_column("batches", sa.Column("accept", sa.JSON))
    op.add_column("batches", sa.Column("not_accepted", sa.BigInteger, nullable=False, server_default="0"))


def downgrade() -> None:
    op.drop_column("batches", "not_accepted")
    op.drop_column("batches", "accept")
