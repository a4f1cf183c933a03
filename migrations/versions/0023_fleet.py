"""Let one fleet at a time start engines."""

from alembic import op
import sqlalchemy as sa


revision = "0023"
down_revision = "0022"


def upgrade() -> None:
    op.create_table(
        "fleet_owner",
        sa.Column("id", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("namespace", sa.String(64), nullable=False),
        sa.Column("owner", sa.String(256), nullable=False),
        sa.Column("until", sa.Float(53), nullable=False),
    )


def downgrade() -> None:
    op.drop_table("fleet_owner")
