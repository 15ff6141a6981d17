"""The tables. `migrations/` makes them; a test holds the two equal.

Contents (message, system prompt, tool list, response, patch, log, task) are rows of `blobs`, once each. A
conversation is a node of a prefix tree: `nodes` has the node before it and the message it adds, and node 0,
which has no row, is the conversation without messages.

A rollout's `agent` is the name of the agent that works on it; `agent_version` is NULL where it is not known.
`token_values` are what a trainer computed for the tokens of calls in one of its steps.

An attempt without a rollout is a client of a gateway that runs alone. A key is kept as its hash only. A reward's
`integrity` is clean or suspicious, as the grader said or, where `review` says why, a person after it; the evidence
is in the verdict.

`sources` are the log files that were read, `traces` and `turns` what was in them: a turn's context is a node of
the same prefix tree, each with a list of messages that the trace's renderer made; `answer_id` is the node that the
turn's action ends in as later turns see it, NULL where they see nothing. `replays` are what was asked of
teachers, with the choices made; an `ask` is there before its request is sent.
"""

from __future__ import annotations

from sqlalchemy import (
    CheckConstraint,
    Column,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    text,
)

HEAD = "0005"
"""The newest migration: what this release reads and writes."""

metadata = MetaData()

blobs = Table(
    "blobs",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("hash", LargeBinary, nullable=False, unique=True),
    Column("codec", Integer, nullable=False),
    Column("data", LargeBinary, nullable=False),
    CheckConstraint("codec IN (0, 1)", name="blobs_codec"),
)

nodes = Table(
    "nodes",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("parent_id", Integer, nullable=False),
    Column("blob_id", Integer, ForeignKey("blobs.id"), nullable=False),
    UniqueConstraint("parent_id", "blob_id", name="nodes_once"),
)

runs = Table(
    "runs",
    metadata,
    Column("id", Text, primary_key=True),
    Column("config", LargeBinary, nullable=False),
    Column("created_at", Float, nullable=False),
)

tasks = Table(
    "tasks",
    metadata,
    Column("run_id", Text, ForeignKey("runs.id"), primary_key=True),
    Column("id", Text, primary_key=True),
    Column("blob_id", Integer, ForeignKey("blobs.id"), nullable=False),
)

rollouts = Table(
    "rollouts",
    metadata,
    Column("id", Text, primary_key=True),
    Column("run_id", Text, nullable=False),
    Column("task_id", Text, nullable=False),
    Column("sample_index", Integer, nullable=False),
    Column("status", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("updated_at", Float, nullable=False),
    Column("error", LargeBinary),
    Column("agent", Text, nullable=False),
    Column("agent_version", Text),
    ForeignKeyConstraint(["run_id", "task_id"], ["tasks.run_id", "tasks.id"]),
    UniqueConstraint("run_id", "task_id", "agent", "agent_version", "sample_index", name="rollouts_once"),
)

attempts = Table(
    "attempts",
    metadata,
    Column("id", Text, primary_key=True),
    Column("rollout_id", Text, ForeignKey("rollouts.id")),
    Column("number", Integer, nullable=False),
    Column("status", Text, nullable=False),
    Column("started_at", Float, nullable=False),
    Column("heartbeat_at", Float, nullable=False),
    Column("ended_at", Float),
    Column("error", LargeBinary),
    Column("timings", LargeBinary, nullable=False),
    Column("patch_id", Integer, ForeignKey("blobs.id")),
    Column("findings", LargeBinary),
    UniqueConstraint("rollout_id", "number", name="attempts_once"),
)

keys = Table(
    "keys",
    metadata,
    Column("digest", LargeBinary, primary_key=True),
    Column("attempt_id", Text, ForeignKey("attempts.id"), nullable=False),
    Column("sampling", LargeBinary, nullable=False),
    Column("budget", LargeBinary, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float),
    Column("revoked_at", Float),
    UniqueConstraint("attempt_id", name="keys_once"),
)

rewards = Table(
    "rewards",
    metadata,
    Column("attempt_id", Text, ForeignKey("attempts.id"), primary_key=True),
    Column("reward", Float, nullable=False),
    Column("reason", Text, nullable=False),
    Column("verdict_id", Integer, ForeignKey("blobs.id"), nullable=False),
    Column("integrity", Text, server_default=text("'clean'"), nullable=False),
    Column("review", Text),
)

logs = Table(
    "logs",
    metadata,
    Column("attempt_id", Text, ForeignKey("attempts.id"), primary_key=True),
    Column("name", Text, primary_key=True),
    Column("blob_id", Integer, ForeignKey("blobs.id"), nullable=False),
)

# From `skeleton_id` to `logprobs` are the contents: the request as skeleton + system + tools + conversation, and
# the tokens, where the prompt is `shared` bytes of the base call's prompt + completion and then `suffix`. A call
# without tokens has none of them but the base, so that the call after it finds the tokens before it.
calls = Table(
    "calls",
    metadata,
    Column("key", Integer, primary_key=True),
    Column("id", Text, nullable=False, unique=True),
    Column("attempt_id", Text, ForeignKey("attempts.id"), nullable=False),
    Column("sequence", Integer, nullable=False),
    Column("dialect", Text, nullable=False),
    Column("requested_model", Text, nullable=False),
    Column("backend", Text, nullable=False),
    Column("backend_model", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("started_at", Float, nullable=False),
    Column("ended_at", Float, nullable=False),
    Column("parent_id", Text),
    Column("session_id", Text),
    Column("agent_id", Text),
    Column("policy_version", Text),
    Column("finish_reason", Text),
    Column("prompt_tokens", Integer, nullable=False),
    Column("completion_tokens", Integer, nullable=False),
    Column("cached_tokens", Integer, nullable=False),
    Column("sampling", LargeBinary, nullable=False),
    Column("error", LargeBinary),
    Column("skeleton_id", Integer, ForeignKey("blobs.id"), nullable=False),
    Column("system_id", Integer, ForeignKey("blobs.id")),
    Column("tools_id", Integer, ForeignKey("blobs.id")),
    Column("node_id", Integer, nullable=False),
    Column("response_id", Integer, ForeignKey("blobs.id"), nullable=False),
    Column("base_key", Integer, ForeignKey("calls.key")),
    Column("prompt_count", Integer),
    Column("shared", Integer),
    Column("suffix", LargeBinary),
    Column("completion_count", Integer),
    Column("completion", LargeBinary),
    Column("logprobs", LargeBinary),
    Column("cache_write_tokens", Integer, server_default=text("0"), nullable=False),
    Column("cost_usd", Float),
    Column("policy_spans", LargeBinary),
    Column("audit", LargeBinary),
    Index("calls_in_order", "attempt_id", "sequence", unique=True),
)

token_values = Table(
    "token_values",
    metadata,
    Column("step", Integer, primary_key=True),
    Column("call_id", Text, ForeignKey("calls.id"), primary_key=True),
    Column("version", Text, nullable=False),
    Column("logprobs", LargeBinary, nullable=False),
    Column("ratios", LargeBinary, nullable=False),
    Column("advantages", LargeBinary, nullable=False),
)

sources = Table(
    "sources",
    metadata,
    Column("path", Text, primary_key=True),
    Column("batch", Text, nullable=False),
    Column("size", Integer, nullable=False),
    Column("modified_ns", Integer, nullable=False),
    Column("reader", Text, nullable=False),
    Column("read_at", Float, nullable=False),
    Index("sources_of_batch", "batch"),
)

traces = Table(
    "traces",
    metadata,
    Column("key", Integer, primary_key=True),
    Column("id", Text, nullable=False, unique=True),
    Column("session_id", Text, nullable=False),
    Column("format", Text, nullable=False),
    Column("source", Text, nullable=False),
    Column("role", Text, nullable=False),
    Column("project", Text),
    Column("agent", Text),
    Column("version", Text),
    Column("parent", LargeBinary),
    Column("outcome", LargeBinary),
    Column("losses", LargeBinary, nullable=False),
    Column("system_id", Integer, ForeignKey("blobs.id")),
    Column("tools_id", Integer, ForeignKey("blobs.id")),
    Column("read_at", Float, nullable=False),
)

turns = Table(
    "turns",
    metadata,
    Column("state_id", Text, primary_key=True),
    Column("trace_key", Integer, ForeignKey("traces.key"), nullable=False),
    Column("position", Integer, nullable=False),
    Column("message_id", Text, nullable=False),
    Column("node_id", Integer, nullable=False),
    Column("answer_id", Integer),
    Column("action_id", Integer, ForeignKey("blobs.id"), nullable=False),
    Column("branch", Text, nullable=False),
    Column("fidelity", Text, nullable=False),
    Column("notes", Text, nullable=False),
    Column("model", Text),
    Column("family", Text),
    Column("timestamp", Text),
    Column("system_id", Integer, ForeignKey("blobs.id")),
    Column("tools_id", Integer, ForeignKey("blobs.id")),
    Column("tool_calls", Integer, nullable=False),
    Column("tool_errors", Integer, nullable=False),
    Column("denied", Integer, nullable=False),
    Column("interrupted", Integer, nullable=False),
    Column("tests", Text),
    Column("edits", Integer, nullable=False),
    Column("edits_survived", Integer),
    Column("commits", Integer, nullable=False),
    Column("feedback", Text),
    Index("turns_in_order", "trace_key", "position"),
)

replays = Table(
    "replays",
    metadata,
    Column("id", Text, primary_key=True),
    Column("config", LargeBinary, nullable=False),
    Column("created_at", Float, nullable=False),
)

asks = Table(
    "asks",
    metadata,
    Column("id", Text, primary_key=True),
    Column("replay_id", Text, ForeignKey("replays.id"), nullable=False),
    Column("state_id", Text, ForeignKey("turns.state_id"), nullable=False),
    Column("kind", Text, nullable=False),
    Column("teacher", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("family", Text),
    Column("number", Integer, nullable=False),
    Column("status", Text, nullable=False),
    Column("reserved_usd", Float),
    Column("cost_usd", Float),
    Column("call_id", Text),
    Column("error", LargeBinary),
    Column("asked_at", Float, nullable=False),
    Column("ended_at", Float),
    CheckConstraint("kind IN ('teacher', 'judge')", name="asks_kind"),
    CheckConstraint("status IN ('asked', 'answered', 'failed')", name="asks_status"),
    Index("asks_of_state", "state_id"),
)
