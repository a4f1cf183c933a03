"""Add turns, rests and sealed secrets of webhook endpoints, and the choice for lines that are too long."""

from alembic import op
import sqlalchemy as sa


revision = "0017"
down_revision = "0016"

TEXTS = ("secret", "old_secret")


def upgrade() -> None:
    op.add_column("webhook_endpoints", sa.Column("busy_until", sa.Float(53), nullable=True))
    op.add_column("webhook_endpoints", sa.Column("rests_until", sa.Float(53), nullable=True))
    op.add_column("webhook_endpoints", sa.Column("served_at", sa.Float(53), nullable=False, server_default="0"))
    op.add_column("webhook_endpoints", sa.Column("failures", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("webhook_endpoints", sa.Column("last_result", sa.String(200), nullable=True))
    with op.batch_alter_table("webhook_endpoints") as table:
        for name in TEXTS:
            table.alter_column(name, existing_type=sa.String(64), type_=sa.String(512))
    op.create_index("ix_webhook_deliveries_due", "webhook_deliveries", ["endpoint_id", "next_at"])
    op.drop_index("ix_webhook_deliveries_endpoint_id", "webhook_deliveries")
    op.add_column("batches", sa.Column("on_long_line", sa.String(16), nullable=False, server_default="fail_file"))


def downgrade() -> None:
    op.drop_column("batches", "on_long_line")
    op.create_index("ix_webhook_deliveries_endpoint_id", "webhook_deliveries", ["endpoint_id"])
    op.drop_index("ix_webhook_deliveries_due", "webhook_deliveries")
    with op.batch_alter_table("webhook_endpoints") as table:
        for name in TEXTS:
            table.alter_column(name, existing_type=sa.String(512), type_=sa.String(64))
    for name in ("last_result", "failures", "served_at", "rests_until", "busy_until"):
        op.drop_column("webhook_endpoints", name)
