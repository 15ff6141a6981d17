"""Adds the sizes of turns' prompts and answers, from which the cost of a replay is estimated."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    """Migrate from 0008: turns that are there stay without sizes, which are then computed when they are needed."""
    is_postgresql = op.get_bind().dialect.name == "postgresql"
    integer = sa.BigInteger() if is_postgresql else sa.Integer()
    op.add_column("traces", sa.Column("tools_source", sa.Text(collation="C") if is_postgresql else sa.Text()))
    for name in ("tools_bytes", "tools_escaped"):
        op.add_column("traces", sa.Column(name, integer))
    for name in ("prompt_bytes", "prompt_escaped", "prompt_messages", "prompt_images", "answer_chars"):
        op.add_column("turns", sa.Column(name, integer))
