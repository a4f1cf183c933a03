"""Record which LoRA adapter a batch uses."""

from alembic import op
import sqlalchemy as sa


revision = "0024"
down_revision = "0023"


def upgrade() -> None:
    op.add_column("batches", sa.Column("adapter", sa.String(512)))
    # What follows a colon names an adapter from here on, and SGLang answered requests for such a model with an error.
    op.execute("DELETE FROM models WHERE name LIKE '%:%'")


def downgrade() -> None:
    op.drop_column("batches", "adapter")
