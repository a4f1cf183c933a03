"""Add held batches, which wait to be started, and previews of their plans."""

from alembic import op
import sqlalchemy as sa


revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    op.add_column("batches", sa.Column("held", sa.Boolean(), server_default=sa.false(), nullable=False))
    op.add_column("batches", sa.Column("preview", sa.JSON(), nullable=True))


def downgrade() -> None:
    op.drop_column("batches", "preview")
    op.drop_column("batches", "held")
