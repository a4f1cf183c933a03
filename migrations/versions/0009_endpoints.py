"""Add the endpoints that each model serves."""

from alembic import op
import sqlalchemy as sa


revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    with op.batch_alter_table("models", schema=None) as batch_op:
        batch_op.add_column(sa.Column("endpoints", sa.JSON(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("models", schema=None) as batch_op:
        batch_op.drop_column("endpoints")
