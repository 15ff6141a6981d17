"""Adds what a gateway that runs alone stores: keys, clients without a rollout, findings, costs, versions in a
call.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Migrate from 0001, including the rows."""
    op.add_column(
        "calls", sa.Column("cache_write_tokens", sa.Integer(), server_default=sa.text("0"), nullable=False)
    )
    op.add_column("calls", sa.Column("cost_usd", sa.Float(), nullable=True))
    op.add_column("calls", sa.Column("policy_spans", sa.LargeBinary(), nullable=True))
    op.add_column("calls", sa.Column("audit", sa.LargeBinary(), nullable=True))
    with op.batch_alter_table("attempts") as attempts:
        attempts.alter_column("rollout_id", existing_type=sa.Text(), nullable=True)
        attempts.add_column(sa.Column("findings", sa.LargeBinary(), nullable=True))
    # Calls named the protocol; now they name the backend that answered, which only the run's configuration held.
    op.execute(
        "UPDATE calls SET backend = 'embedded' WHERE attempt_id IN (SELECT attempts.id FROM attempts "
        "JOIN rollouts ON rollouts.id = attempts.rollout_id JOIN runs ON runs.id = rollouts.run_id "
        "WHERE json_extract(CAST(runs.config AS TEXT), '$.backend') = 'embedded')"
    )
    op.create_table(
        "keys",
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("attempt_id", sa.Text(), nullable=False),
        sa.Column("sampling", sa.LargeBinary(), nullable=False),
        sa.Column("budget", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=True),
        sa.Column("revoked_at", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"]),
        sa.PrimaryKeyConstraint("digest"),
        sa.UniqueConstraint("attempt_id", name="keys_once"),
    )
