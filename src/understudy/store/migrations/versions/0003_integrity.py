"""Adds whether a graded patch is suspicious, and what a person decided about it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Migrate from 0002, including the rows: before patches were audited, none was suspicious."""
    op.add_column("rewards", sa.Column("integrity", sa.Text(), server_default=sa.text("'clean'"), nullable=False))
    op.add_column("rewards", sa.Column("review", sa.Text(), nullable=True))
