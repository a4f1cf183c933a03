"""Add the sessions of the dashboard."""

from alembic import op
import sqlalchemy as sa


revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    op.create_table(
        "dashboard_sessions",
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("key_id", sa.String(length=64), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("digest"),
    )


def downgrade() -> None:
    op.drop_table("dashboard_sessions")
