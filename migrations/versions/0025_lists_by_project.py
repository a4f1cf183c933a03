"""Index files and batches as their lists show them, so that a page reads no other project's rows."""

from alembic import op


revision = "0025"
down_revision = "0024"


def upgrade() -> None:
    op.drop_index("ix_files_project_id", "files")
    for table in ("files", "batches"):
        op.create_index(f"ix_{table}_listed", table, ["project_id", "seq"])


def downgrade() -> None:
    for table in ("files", "batches"):
        op.drop_index(f"ix_{table}_listed", table)
    op.create_index("ix_files_project_id", "files", ["project_id"])
