"""Add the strongest class that a project's and a key's online requests may have."""

from alembic import op
import sqlalchemy as sa


revision = "0020"
down_revision = "0019"


def upgrade() -> None:
    op.add_column("projects", sa.Column("tier", sa.String(16), nullable=False, server_default="default"))
    op.add_column("api_keys", sa.Column("tier", sa.String(16)))


def downgrade() -> None:
    op.drop_column("api_keys", "tier")
    op.drop_column("projects", "tier")
