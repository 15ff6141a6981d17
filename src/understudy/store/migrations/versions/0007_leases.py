"""Who may execute a run, and how long an attempt is its worker's."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """From 0006: every run so far was executed by its own process."""
    op.add_column("runs", sa.Column("engine", sa.Text(), server_default=sa.text("'local'"), nullable=False))
    op.add_column("runs", sa.Column("release", sa.Text(), nullable=True))
    op.add_column("attempts", sa.Column("worker", sa.Text(), nullable=True))
    op.add_column("attempts", sa.Column("lease_until", sa.Float(), nullable=True))
