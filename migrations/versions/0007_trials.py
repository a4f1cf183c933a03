"""Add the trial columns of slices, which find a request that kills the engine."""

from alembic import op
import sqlalchemy as sa


revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    with op.batch_alter_table("slices", schema=None) as batch_op:
        batch_op.add_column(sa.Column("deaths", sa.Integer(), nullable=False, server_default="0"))
        batch_op.add_column(sa.Column("trial", sa.BigInteger(), nullable=True))
        batch_op.add_column(sa.Column("trial_place", sa.BigInteger(), nullable=True))
        batch_op.add_column(sa.Column("trial_epoch", sa.BigInteger(), nullable=True))
        batch_op.add_column(sa.Column("alone_deaths", sa.Integer(), nullable=False, server_default="0"))


def downgrade() -> None:
    with op.batch_alter_table("slices", schema=None) as batch_op:
        for name in ("alone_deaths", "trial_epoch", "trial_place", "trial", "deaths"):
            batch_op.drop_column(name)
