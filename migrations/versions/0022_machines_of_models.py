"""Record on which machine a model's workers run, for its plans."""

from alembic import op
import sqlalchemy as sa


revision = "0022"
down_revision = "0021"


def upgrade() -> None:
    op.add_column("models", sa.Column("machine", sa.JSON()))


def downgrade() -> None:
    op.drop_column("models", "machine")
