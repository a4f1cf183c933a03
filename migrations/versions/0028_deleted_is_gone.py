"""Let what is deleted be gone: texts of pictures are apart; and count as failed only what was answered."""

from alembic import op
import sqlalchemy as sa


revision = "0028"
down_revision = "0027"

NOT_RUN = ("batch_expired", "batch_cancelled")
BATCHES = sa.table(
    "batches", sa.column("seq"), sa.column("status"), sa.column("failed"), sa.column("causes", sa.JSON())
)


def upgrade() -> None:
    op.add_column("batches", sa.Column("deleted_at", sa.BigInteger()))
    op.add_column("batches", sa.Column("unknown_fields", sa.JSON()))
    op.add_column("windows", sa.Column("texts", sa.Boolean(), server_default=sa.true()))
    op.create_index("ix_uploads_file_id", "uploads", ["file_id"])
    op.create_index("ix_batches_error_file", "batches", ["error_file_id"])
    deleted = sa.text("deleted_at IS NOT NULL")
    op.create_index("ix_files_deleted", "files", ["deleted_at"], sqlite_where=deleted, postgresql_where=deleted)
    _move_not_run(-1)
    _forget_what_was_deleted()


def downgrade() -> None:
    _move_not_run(1)
    op.drop_index("ix_files_deleted", "files")
    op.drop_index("ix_batches_error_file", "batches")
    op.drop_index("ix_uploads_file_id", "uploads")
    op.drop_column("windows", "texts")
    op.drop_column("batches", "unknown_fields")
    op.drop_column("batches", "deleted_at")


def _move_not_run(sign: int) -> None:
    """Count the requests that did not run among the failed ones (1), or no longer (-1)."""
    connection = op.get_bind()
    ended = BATCHES.c.status.in_(["expired", "cancelled"]) & BATCHES.c.causes.is_not(None)
    for seq, causes in connection.execute(sa.select(BATCHES.c.seq, BATCHES.c.causes).where(ended)).all():
        count = sum(cause["count"] for cause in causes or [] if cause["code"] in NOT_RUN)
        if count:
            more = {"failed": BATCHES.c.failed + sign * count}
            connection.execute(sa.update(BATCHES).where(BATCHES.c.seq == seq).values(more))


def _forget_what_was_deleted() -> None:
    """Take out what files said that were deleted before."""
    gone = "(SELECT id FROM files WHERE deleted_at IS NOT NULL)"
    shares = "FROM slices JOIN slice_batches ON slice_batches.slice_id = slices.id"
    batches = f"JOIN batches ON batches.id = slice_batches.batch_id WHERE batches.input_file_id IN {gone}"
    for statement in (
        "UPDATE files SET filename = '' WHERE deleted_at IS NOT NULL",
        f"UPDATE uploads SET filename = '' WHERE file_id IN {gone}",
        f"UPDATE batches SET errors = NULL, unknown_parameters = NULL WHERE input_file_id IN {gone}",
        f"UPDATE batches SET causes = NULL WHERE error_file_id IN {gone}",
        f"UPDATE windows SET texts = false WHERE id IN (SELECT slices.window_id {shares} {batches})",
    ):
        op.execute(statement)
