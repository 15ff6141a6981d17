"""Adds the workers and the runs that they leave to others, and the last commit of each PostgreSQL writer."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Migrate from 0007: until then, workers were known only by the attempts that they held."""
    is_postgresql = op.get_bind().dialect.name == "postgresql"
    text = sa.Text(collation="C") if is_postgresql else sa.Text()
    integer = sa.BigInteger() if is_postgresql else sa.Integer()
    op.create_table(
        "workers",
        sa.Column("id", text, primary_key=True),
        sa.Column("release", text, nullable=False),
        sa.Column("capacity", integer, nullable=False),
        sa.Column("run_id", text, nullable=True),
        sa.Column("started_at", sa.Float(), nullable=False),
        sa.Column("seen_at", sa.Float(), nullable=False),
        sa.Column("lease_until", sa.Float(), nullable=False),
        sa.Column("leaves", sa.LargeBinary(), nullable=False),
    )
    if is_postgresql:
        op.alter_column("store_writers", "opened_at", new_column_name="committed_at")
