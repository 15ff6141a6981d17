"""Adds labels that people gave to rollouts and to preference pairs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Migrate from 0005: adds one table."""
    op.create_table(
        "votes",
        sa.Column("subject", sa.Text(), primary_key=True),
        sa.Column("subject_id", sa.Text(), primary_key=True),
        sa.Column("voter", sa.Text(), primary_key=True),
        sa.Column("label", sa.Text(), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.Column("voted_at", sa.Float(), nullable=False),
        sa.CheckConstraint("subject IN ('rollout', 'pair')", name="votes_subject"),
    )
