"""Let a model say what finds thoughts in its answers."""

from alembic import op
import sqlalchemy as sa


revision = "0033"
down_revision = "0032"


def upgrade() -> None:
    op.add_column("models", sa.Column("reasoning_parser", sa.String(64)))


def downgrade() -> None:
    op.drop_column("models", "reasoning_parser")
