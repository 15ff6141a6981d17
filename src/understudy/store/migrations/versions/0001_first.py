"""The first tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create the tables in an empty database."""
    op.create_table(
        "blobs",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("hash", sa.LargeBinary(), nullable=False),
        sa.Column("codec", sa.Integer(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.CheckConstraint("codec IN (0, 1)", name="blobs_codec"),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("hash"),
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("config", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "nodes",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("parent_id", sa.Integer(), nullable=False),
        sa.Column("blob_id", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["blob_id"], ["blobs.id"]),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("parent_id", "blob_id", name="nodes_once"),
    )
    op.create_table(
        "tasks",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("blob_id", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["blob_id"], ["blobs.id"]),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"]),
        sa.PrimaryKeyConstraint("run_id", "id"),
    )
    op.create_table(
        "rollouts",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("task_id", sa.Text(), nullable=False),
        sa.Column("sample_index", sa.Integer(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("updated_at", sa.Float(), nullable=False),
        sa.Column("error", sa.LargeBinary(), nullable=True),
        sa.ForeignKeyConstraint(["run_id", "task_id"], ["tasks.run_id", "tasks.id"]),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("run_id", "task_id", "sample_index", name="rollouts_once"),
    )
    op.create_table(
        "attempts",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=False),
        sa.Column("heartbeat_at", sa.Float(), nullable=False),
        sa.Column("ended_at", sa.Float(), nullable=True),
        sa.Column("error", sa.LargeBinary(), nullable=True),
        sa.Column("timings", sa.LargeBinary(), nullable=False),
        sa.Column("patch_id", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(["patch_id"], ["blobs.id"]),
        sa.ForeignKeyConstraint(["rollout_id"], ["rollouts.id"]),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("rollout_id", "number", name="attempts_once"),
    )
    op.create_table(
        "calls",
        sa.Column("key", sa.Integer(), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("attempt_id", sa.Text(), nullable=False),
        sa.Column("sequence", sa.Integer(), nullable=False),
        sa.Column("dialect", sa.Text(), nullable=False),
        sa.Column("requested_model", sa.Text(), nullable=False),
        sa.Column("backend", sa.Text(), nullable=False),
        sa.Column("backend_model", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=False),
        sa.Column("ended_at", sa.Float(), nullable=False),
        sa.Column("parent_id", sa.Text(), nullable=True),
        sa.Column("session_id", sa.Text(), nullable=True),
        sa.Column("agent_id", sa.Text(), nullable=True),
        sa.Column("policy_version", sa.Text(), nullable=True),
        sa.Column("finish_reason", sa.Text(), nullable=True),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("completion_tokens", sa.Integer(), nullable=False),
        sa.Column("cached_tokens", sa.Integer(), nullable=False),
        sa.Column("sampling", sa.LargeBinary(), nullable=False),
        sa.Column("error", sa.LargeBinary(), nullable=True),
        sa.Column("skeleton_id", sa.Integer(), nullable=False),
        sa.Column("system_id", sa.Integer(), nullable=True),
        sa.Column("tools_id", sa.Integer(), nullable=True),
        sa.Column("node_id", sa.Integer(), nullable=False),
        sa.Column("response_id", sa.Integer(), nullable=False),
        sa.Column("base_key", sa.Integer(), nullable=True),
        sa.Column("prompt_count", sa.Integer(), nullable=True),
        sa.Column("shared", sa.Integer(), nullable=True),
        sa.Column("suffix", sa.LargeBinary(), nullable=True),
        sa.Column("completion_count", sa.Integer(), nullable=True),
        sa.Column("completion", sa.LargeBinary(), nullable=True),
        sa.Column("logprobs", sa.LargeBinary(), nullable=True),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"]),
        sa.ForeignKeyConstraint(["base_key"], ["calls.key"]),
        sa.ForeignKeyConstraint(["response_id"], ["blobs.id"]),
        sa.ForeignKeyConstraint(["skeleton_id"], ["blobs.id"]),
        sa.ForeignKeyConstraint(["system_id"], ["blobs.id"]),
        sa.ForeignKeyConstraint(["tools_id"], ["blobs.id"]),
        sa.PrimaryKeyConstraint("key"),
        sa.UniqueConstraint("id"),
    )
    op.create_index("calls_in_order", "calls", ["attempt_id", "sequence"], unique=True)
    op.create_table(
        "logs",
        sa.Column("attempt_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("blob_id", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"]),
        sa.ForeignKeyConstraint(["blob_id"], ["blobs.id"]),
        sa.PrimaryKeyConstraint("attempt_id", "name"),
    )
    op.create_table(
        "rewards",
        sa.Column("attempt_id", sa.Text(), nullable=False),
        sa.Column("reward", sa.Float(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("verdict_id", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"]),
        sa.ForeignKeyConstraint(["verdict_id"], ["blobs.id"]),
        sa.PrimaryKeyConstraint("attempt_id"),
    )
