"""Add drained workers, which take no new slices."""

from alembic import op
import sqlalchemy as sa


revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.create_table(
        "drained_workers",
        sa.Column("name", sa.String(length=256), nullable=False),
        sa.Column("since", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )


def downgrade() -> None:
    op.drop_table("drained_workers")
