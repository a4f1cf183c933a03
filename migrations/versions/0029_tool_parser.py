"""Let a model's row know what finds tool calls in its answers."""

from alembic import op
import sqlalchemy as sa


revision = "0029"
down_revision = "0028"


def upgrade() -> None:
    op.add_column("models", sa.Column("tool_parser", sa.String(64)))


def downgrade() -> None:
    op.drop_column("models", "tool_parser")
