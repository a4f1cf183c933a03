"""Record how many segments a slice's shard has, and find running batches whose index was lost."""

from alembic import op
import sqlalchemy as sa


revision = "0027"
down_revision = "0026"


def upgrade() -> None:
    op.add_column("slices", sa.Column("segments", sa.JSON()))
    lost = sa.text("status = 'in_progress' AND index_id IS NULL")
    op.create_index("ix_batches_without_index", "batches", ["seq"], sqlite_where=lost, postgresql_where=lost)


def downgrade() -> None:
    op.drop_index("ix_batches_without_index", "batches")
    op.drop_column("slices", "segments")
