"""Add to batches the deaths of their validators and the size of their index."""

from alembic import op
import sqlalchemy as sa


revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    op.add_column("batches", sa.Column("validating_until", sa.Float(53), nullable=True))
    op.add_column("batches", sa.Column("validation_deaths", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("batches", sa.Column("index_bytes", sa.BigInteger(), nullable=False, server_default="0"))


def downgrade() -> None:
    op.drop_column("batches", "index_bytes")
    op.drop_column("batches", "validation_deaths")
    op.drop_column("batches", "validating_until")
