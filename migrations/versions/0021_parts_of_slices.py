"""Add which requests a slice has that has handed some over."""

from alembic import op
import sqlalchemy as sa


revision = "0021"
down_revision = "0020"


def upgrade() -> None:
    op.add_column("slices", sa.Column("offsets", sa.LargeBinary()))


def downgrade() -> None:
    op.drop_column("slices", "offsets")
