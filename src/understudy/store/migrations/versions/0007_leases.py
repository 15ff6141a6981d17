"""Adds who may execute a run, and until when an attempt belongs to its worker."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Migrate from 0006: until then, every run was executed by a single process."""
    op.add_column("runs", sa.Column("engine", sa.Text(), server_default=sa.text("'local'"), nullable=False))
    op.add_column("runs", sa.Column("release", sa.Text(), nullable=True))
    op.add_column("attempts", sa.Column("worker", sa.Text(), nullable=True))
    op.add_column("attempts", sa.Column("lease_until", sa.Float(), nullable=True))
