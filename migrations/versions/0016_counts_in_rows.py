"""Add to the batch's row what is polled, so that no poll reads all of its slices."""

from alembic import op
import sqlalchemy as sa


revision = "0016"
down_revision = "0015"

TOKENS = ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")
COUNTS = ("completed", "failed", *TOKENS)
LIVE = "('validating', 'in_progress', 'finalizing', 'cancelling')"
PARTIAL = {
    "ix_batches_validating": ("batches", ["project_id", "expires_at", "seq"], "status = 'validating'"),
    "ix_batches_unplanned": (
        "batches",
        ["project_id", "expires_at", "seq"],
        "status = 'in_progress' AND planned < total",
    ),
    "ix_batches_urgent": (
        "batches",
        ["model", "project_id", "urgent_at"],
        "status = 'in_progress' AND slices_left > 0",
    ),
    "ix_batches_done": ("batches", ["seq"], "status = 'in_progress' AND slices_left = 0 AND planned = total"),
    "ix_batches_closing": ("batches", ["expires_at"], "status IN ('validating', 'in_progress')"),
    "ix_slices_leased": ("slices", ["lease_until"], "status = 'leased'"),
    "ix_slice_batches_ready": ("slice_batches", ["batch_id", "slice_id"], "status = 'ready'"),
    "ix_slice_batches_leased": ("slice_batches", ["batch_id", "slice_id"], "status = 'leased'"),
    "ix_files_kept": ("files", ["expires_at"], "deleted_at IS NULL"),
}


def upgrade() -> None:
    op.add_column("batches", sa.Column("slices", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("batches", sa.Column("slices_left", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("batches", sa.Column("urgent_at", sa.Float(53), nullable=True))
    op.add_column("batches", sa.Column("ended_at", sa.BigInteger(), nullable=True))
    op.add_column("slice_batches", sa.Column("status", sa.String(16), nullable=False, server_default="ready"))
    op.execute(
        "UPDATE slice_batches SET status = (SELECT slices.status FROM slices WHERE slices.id = slice_batches.slice_id)"
    )
    mine = "FROM slice_batches WHERE slice_batches.batch_id = batches.id"
    sums = [
        f"{name} = (SELECT COALESCE(SUM(slice_batches.{name}), 0) {mine} AND slice_batches.status = 'done')"
        for name in COUNTS
    ]
    op.execute(
        f"UPDATE batches SET slices = (SELECT COUNT(*) {mine}), "
        f"slices_left = (SELECT COUNT(*) {mine} AND slice_batches.status <> 'done'), {', '.join(sums)} "
        f"WHERE status IN {LIVE}"
    )
    work_s = "CASE WHEN planned_compute_s > planned_memory_s THEN planned_compute_s ELSE planned_memory_s END"
    op.execute(
        f"UPDATE batches SET urgent_at = expires_at - ({work_s}) * (planned - completed - failed) / planned "
        "WHERE status = 'in_progress' AND planned > 0"
    )
    op.execute(
        "UPDATE batches SET ended_at = COALESCE(completed_at, failed_at, cancelled_at, expired_at) "
        f"WHERE status NOT IN {LIVE}"
    )
    for name in TOKENS:
        op.drop_column("slice_batches", name)
    op.drop_index("ix_slices_status", "slices")
    op.drop_index("ix_files_expires_at", "files")
    op.create_index("ix_slices_window_id", "slices", ["window_id"])
    op.create_index("ix_batches_ended", "batches", ["ended_at"])
    for name, (table, columns, where) in PARTIAL.items():
        op.create_index(name, table, columns, sqlite_where=sa.text(where), postgresql_where=sa.text(where))


def downgrade() -> None:
    for name, (table, _, _) in reversed(PARTIAL.items()):
        op.drop_index(name, table)
    op.drop_index("ix_batches_ended", "batches")
    op.drop_index("ix_slices_window_id", "slices")
    op.create_index("ix_files_expires_at", "files", ["expires_at"])
    op.create_index("ix_slices_status", "slices", ["status"])
    for name in TOKENS:
        op.add_column("slice_batches", sa.Column(name, sa.BigInteger(), nullable=False, server_default="0"))
    op.drop_column("slice_batches", "status")
    for name in ("ended_at", "urgent_at", "slices_left", "slices"):
        op.drop_column("batches", name)
