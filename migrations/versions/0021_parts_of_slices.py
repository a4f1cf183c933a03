"""Record which requests a slice has, where its worker handed some over."""

from alembic import op
import sqlalchemy as sa


revision = "0021"
down_revision = "0020"


def upgrade() -> None:
    op.add_column("slices", sa.Column("offsets", sa.LargeBinary()))


def downgrade() -> None:
    left = op.get_bind().scalar(sa.text("SELECT count(*) FROM slices WHERE offsets IS NOT NULL AND status <> 'done'"))
    if left:  # without offsets they would mean other requests
        raise RuntimeError(f"{left} slices with handed-over requests are not done. Let their batches end first.")
    op.drop_column("slices", "offsets")
