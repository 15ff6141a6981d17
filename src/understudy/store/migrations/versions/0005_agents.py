"""Adds which agent worked on a rollout, and what a trainer computed for the tokens of calls."""

from __future__ import annotations

import re

import sqlalchemy as sa
import zstandard
from alembic import op

revision = "0005"
down_revision = "0004"

_CLAUDE_CODE_VERSION = re.compile(rb'"claude_code_version":"([^"\\]{1,100})"')
_STREAM_BYTES = 1 << 20
"""How much of an agent's output is searched for its version, which is in one of the first lines."""


def upgrade() -> None:
    """Migrate from 0004, including the rows: a run had one agent, which its configuration names."""
    op.add_column("rollouts", sa.Column("agent", sa.Text(), nullable=True))
    op.add_column("rollouts", sa.Column("agent_version", sa.Text(), nullable=True))
    op.execute(
        "UPDATE rollouts SET agent = (SELECT COALESCE(json_extract(CAST(runs.config AS TEXT), '$.agent'), "
        "'claude-code') FROM runs WHERE runs.id = rollouts.run_id)"
    )
    _find_versions(op.get_bind())
    with op.batch_alter_table("rollouts") as rollouts:
        rollouts.alter_column("agent", existing_type=sa.Text(), nullable=False)
        rollouts.drop_constraint("rollouts_once", type_="unique")
        rollouts.create_unique_constraint(
            "rollouts_once", ["run_id", "task_id", "agent", "agent_version", "sample_index"]
        )
    op.create_table(
        "token_values",
        sa.Column("step", sa.Integer(), primary_key=True),
        sa.Column("call_id", sa.Text(), sa.ForeignKey("calls.id"), primary_key=True),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("logprobs", sa.LargeBinary(), nullable=False),
        sa.Column("ratios", sa.LargeBinary(), nullable=False),
        sa.Column("advantages", sa.LargeBinary(), nullable=False),
    )


def _find_versions(connection: sa.Connection) -> None:
    """Set the version of Claude Code that the output of a rollout's last attempt names; otherwise it stays
    unknown.
    """
    streams = connection.exec_driver_sql(
        "SELECT rollouts.id, blobs.codec, blobs.data FROM rollouts "
        "JOIN attempts ON attempts.rollout_id = rollouts.id "
        "JOIN logs ON logs.attempt_id = attempts.id AND logs.name = 'stream.jsonl' "
        "JOIN blobs ON blobs.id = logs.blob_id WHERE rollouts.agent = 'claude-code' ORDER BY attempts.number"
    )
    versions: dict[str, str] = {}
    for rollout_id, codec, data in streams:
        try:
            start = zstandard.ZstdDecompressor().stream_reader(data).read(_STREAM_BYTES) if codec else data
        except zstandard.ZstdError:
            continue  # A damaged log is reported when it is read; the migration need not fail because of it.
        if match := _CLAUDE_CODE_VERSION.search(start[:_STREAM_BYTES]):
            versions[rollout_id] = match[1].decode(errors="replace")
    for rollout_id, version in versions.items():
        connection.exec_driver_sql("UPDATE rollouts SET agent_version = ? WHERE id = ?", (version, rollout_id))
