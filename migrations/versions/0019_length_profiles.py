"""Add the lengths of earlier answers, and whether a project's are remembered."""

from alembic import op
import sqlalchemy as sa


revision = "0019"
down_revision = "0018"


def upgrade() -> None:
    op.create_table(
        "length_profiles",
        sa.Column("key", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("project_id", sa.String(64), nullable=False),
        sa.Column("model", sa.String(512), nullable=False),
        sa.Column("profile", sa.Text(), nullable=False),
        sa.Column("seen_at", sa.BigInteger(), nullable=False),
    )
    op.create_index("ix_length_profiles_seen", "length_profiles", ["project_id", "model", "seen_at"])
    op.add_column("projects", sa.Column("remembers_lengths", sa.Boolean(), nullable=False, server_default=sa.true()))


def downgrade() -> None:
    op.drop_column("projects", "remembers_lengths")
    op.drop_index("ix_length_profiles_seen", "length_profiles")
    op.drop_table("length_profiles")
