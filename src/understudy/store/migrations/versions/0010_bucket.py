"""Adds settings of a store, and the sizes of contents that are in a bucket."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    """Migrate from 0009: all contents that are there stay in the database."""
    is_postgresql = op.get_bind().dialect.name == "postgresql"
    op.create_table(
        "settings",
        sa.Column("name", sa.Text(collation="C") if is_postgresql else sa.Text(), primary_key=True),
        sa.Column("value", sa.LargeBinary(), nullable=False),
    )
    op.add_column("blobs", sa.Column("bucket_bytes", sa.BigInteger() if is_postgresql else sa.Integer()))
