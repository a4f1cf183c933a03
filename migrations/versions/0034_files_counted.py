"""Count a project's files, and add up their bytes, without reading their rows."""

from alembic import op
import sqlalchemy as sa


revision = "0034"
down_revision = "0033"


def upgrade() -> None:
    kept = sa.text("deleted_at IS NULL")
    columns = ["project_id", "size_bytes"]
    op.create_index("ix_files_counted", "files", columns, sqlite_where=kept, postgresql_where=kept)


def downgrade() -> None:
    op.drop_index("ix_files_counted", "files")
