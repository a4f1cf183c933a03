"""Record which parameters of a batch's requests no engine knows."""

from alembic import op
import sqlalchemy as sa


revision = "0026"
down_revision = "0025"


def upgrade() -> None:
    op.add_column("batches", sa.Column("unknown_parameters", sa.JSON()))


def downgrade() -> None:
    op.drop_column("batches", "unknown_parameters")
