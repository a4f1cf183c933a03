"""Add to each line of the audit log what it changed."""

from alembic import op
import sqlalchemy as sa


revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    op.add_column("audit_events", sa.Column("detail", sa.String(512), server_default="", nullable=False))


def downgrade() -> None:
    op.drop_column("audit_events", "detail")
