"""Adds sessions that other programs logged, and what teachers were asked about them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Migrate from 0003, including the rows. The new tables are empty."""
    op.create_table(
        "sources",
        sa.Column("path", sa.Text, primary_key=True),
        sa.Column("batch", sa.Text, nullable=False),
        sa.Column("size", sa.Integer, nullable=False),
        sa.Column("modified_ns", sa.Integer, nullable=False),
        sa.Column("reader", sa.Text, nullable=False),
        sa.Column("read_at", sa.Float, nullable=False),
    )
    op.create_index("sources_of_batch", "sources", ["batch"])
    op.create_table(
        "traces",
        sa.Column("key", sa.Integer, primary_key=True),
        sa.Column("id", sa.Text, nullable=False, unique=True),
        sa.Column("session_id", sa.Text, nullable=False),
        sa.Column("format", sa.Text, nullable=False),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("role", sa.Text, nullable=False),
        sa.Column("project", sa.Text),
        sa.Column("agent", sa.Text),
        sa.Column("version", sa.Text),
        sa.Column("parent", sa.LargeBinary),
        sa.Column("outcome", sa.LargeBinary),
        sa.Column("losses", sa.LargeBinary, nullable=False),
        sa.Column("system_id", sa.Integer, sa.ForeignKey("blobs.id")),
        sa.Column("tools_id", sa.Integer, sa.ForeignKey("blobs.id")),
        sa.Column("read_at", sa.Float, nullable=False),
    )
    op.create_table(
        "turns",
        sa.Column("state_id", sa.Text, primary_key=True),
        sa.Column("trace_key", sa.Integer, sa.ForeignKey("traces.key"), nullable=False),
        sa.Column("position", sa.Integer, nullable=False),
        sa.Column("message_id", sa.Text, nullable=False),
        sa.Column("node_id", sa.Integer, nullable=False),
        sa.Column("answer_id", sa.Integer),
        sa.Column("action_id", sa.Integer, sa.ForeignKey("blobs.id"), nullable=False),
        sa.Column("branch", sa.Text, nullable=False),
        sa.Column("fidelity", sa.Text, nullable=False),
        sa.Column("notes", sa.Text, nullable=False),
        sa.Column("model", sa.Text),
        sa.Column("family", sa.Text),
        sa.Column("timestamp", sa.Text),
        sa.Column("system_id", sa.Integer, sa.ForeignKey("blobs.id")),
        sa.Column("tools_id", sa.Integer, sa.ForeignKey("blobs.id")),
        sa.Column("tool_calls", sa.Integer, nullable=False),
        sa.Column("tool_errors", sa.Integer, nullable=False),
        sa.Column("denied", sa.Integer, nullable=False),
        sa.Column("interrupted", sa.Integer, nullable=False),
        sa.Column("tests", sa.Text),
        sa.Column("edits", sa.Integer, nullable=False),
        sa.Column("edits_survived", sa.Integer),
        sa.Column("commits", sa.Integer, nullable=False),
        sa.Column("feedback", sa.Text),
    )
    op.create_index("turns_in_order", "turns", ["trace_key", "position"])
    op.create_table(
        "replays",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("config", sa.LargeBinary, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
    )
    op.create_table(
        "asks",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("replay_id", sa.Text, sa.ForeignKey("replays.id"), nullable=False),
        sa.Column("state_id", sa.Text, sa.ForeignKey("turns.state_id"), nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("teacher", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("family", sa.Text),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("reserved_usd", sa.Float),
        sa.Column("cost_usd", sa.Float),
        sa.Column("call_id", sa.Text),
        sa.Column("error", sa.LargeBinary),
        sa.Column("asked_at", sa.Float, nullable=False),
        sa.Column("ended_at", sa.Float),
        sa.CheckConstraint("kind IN ('teacher', 'judge')", name="asks_kind"),
        sa.CheckConstraint("status IN ('asked', 'answered', 'failed')", name="asks_status"),
    )
    op.create_index("asks_of_state", "asks", ["state_id"])
