"""The tables. `migrations/` creates them; a test checks that both agree.

Contents (message, system prompt, tool list, response, patch, log, task) are rows of `blobs`, each stored once.
The `data` of a large one may be in a bucket instead (`store.bucket`): then `bucket_bytes` is the size of the
object; otherwise it is NULL. `settings` are those of the store itself, as JSON. A conversation is a node of a
prefix tree: a row of `nodes` has the node before it and the message that it adds. Node 0, which has no row, is the
conversation without messages.

A run's `engine` is `local` if one process executes it, or `workers` if any worker of the `release` may claim its
rollouts. An attempt belongs to its `worker` until `lease_until` (Unix seconds, by the database's clock). `workers`
are the processes that claim rollouts, or that execute the run `run_id` alone: `leaves` is a JSON object with the
reasons why they leave runs to others, by run, and `seen_at` the time at which they last renewed their leases.

A rollout's `agent` is the name of the agent that works on it; `agent_version` is NULL if it is unknown.
`token_values` are what a trainer computed for the tokens of calls in one of its steps.

An attempt without a rollout is a client of a gateway that runs alone. Only the hash of a key is stored. A reward's
`integrity` is clean, suspicious or forged: the grader's finding or, if `review` gives a reason, a person's later
decision. The evidence is in the verdict.

`votes` are labels that people gave to rollouts and to preference pairs, by their ids.

`sources` are the log files that were read, `traces` and `turns` their contents: a turn's context is a node of the
same prefix tree, whose nodes hold a list of messages made by the trace's renderer; `answer_id` is the node in
which the turn's action ends, as later turns see it, NULL if they see nothing. `prompt_…`, `answer_chars` and
`tools_…` are sizes, from which costs are estimated; NULL in turns that an earlier release stored. `replays` hold
the configurations of replays, and `asks` their questions to teachers; an ask is stored before its request is sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    LargeBinary,
    MetaData,
    Table,
    UniqueConstraint,
    text,
)
from sqlalchemy import Integer as _SqliteInteger
from sqlalchemy import Text as _SqliteText
from sqlalchemy.types import TypeEngine

HEAD = "0010"
"""The newest migration, which is the schema that this release reads and writes.

When raising it, extend `_READ_BY_VIEWS` in `store.sqlite` with views for what is new. Otherwise stores of the
release before could no longer be read on read-only media.
"""

metadata = MetaData()

# SQLite has 64-bit integers and compares texts by bytes; PostgreSQL needs these types for that.
Integer = BigInteger().with_variant(_SqliteInteger(), "sqlite")
Text = _SqliteText().with_variant(_SqliteText(collation="C"), "postgresql")


def _columns(kind: type[Any] | TypeEngine[Any], *names: str, nullable: bool = False) -> Iterator[Column[Any]]:
    """Return columns of one type, in this order. They are NOT NULL unless `nullable`."""
    return (Column(name, kind, nullable=nullable) for name in names)


def _reference(name: str, column: str, *, nullable: bool = False, primary_key: bool = False) -> Column[Any]:
    """Return a column that refers to a row of another table; `column` is that table's key, such as "blobs.id"."""
    kind: TypeEngine[Any] = Integer if column in ("blobs.id", "calls.key", "traces.key") else Text
    return Column(name, kind, ForeignKey(column), primary_key=primary_key, nullable=nullable)


blobs = Table(
    "blobs",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("hash", LargeBinary, nullable=False, unique=True),
    Column("codec", Integer, nullable=False),
    Column("data", LargeBinary, nullable=False),
    *_columns(Integer, "bucket_bytes", nullable=True),
    CheckConstraint("codec IN (0, 1)", name="blobs_codec"),
)

settings = Table(
    "settings",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", LargeBinary, nullable=False),
)

nodes = Table(
    "nodes",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("parent_id", Integer, nullable=False),
    _reference("blob_id", "blobs.id"),
    UniqueConstraint("parent_id", "blob_id", name="nodes_once"),
)

runs = Table(
    "runs",
    metadata,
    Column("id", Text, primary_key=True),
    Column("config", LargeBinary, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("engine", Text, server_default=text("'local'"), nullable=False),
    *_columns(Text, "release", nullable=True),
)

tasks = Table(
    "tasks",
    metadata,
    _reference("run_id", "runs.id", primary_key=True),
    Column("id", Text, primary_key=True),
    _reference("blob_id", "blobs.id"),
)

rollouts = Table(
    "rollouts",
    metadata,
    Column("id", Text, primary_key=True),
    *_columns(Text, "run_id", "task_id"),
    *_columns(Integer, "sample_index"),
    *_columns(Text, "status"),
    *_columns(Float, "created_at", "updated_at"),
    *_columns(LargeBinary, "error", nullable=True),
    *_columns(Text, "agent"),
    *_columns(Text, "agent_version", nullable=True),
    ForeignKeyConstraint(["run_id", "task_id"], ["tasks.run_id", "tasks.id"]),
    UniqueConstraint("run_id", "task_id", "agent", "agent_version", "sample_index", name="rollouts_once"),
)

attempts = Table(
    "attempts",
    metadata,
    Column("id", Text, primary_key=True),
    _reference("rollout_id", "rollouts.id", nullable=True),
    *_columns(Integer, "number"),
    *_columns(Text, "status"),
    *_columns(Float, "started_at", "heartbeat_at"),
    *_columns(Float, "ended_at", nullable=True),
    *_columns(LargeBinary, "error", nullable=True),
    *_columns(LargeBinary, "timings"),
    _reference("patch_id", "blobs.id", nullable=True),
    *_columns(LargeBinary, "findings", nullable=True),
    *_columns(Text, "worker", nullable=True),
    *_columns(Float, "lease_until", nullable=True),
    UniqueConstraint("rollout_id", "number", name="attempts_once"),
)

workers = Table(
    "workers",
    metadata,
    Column("id", Text, primary_key=True),
    *_columns(Text, "release"),
    *_columns(Integer, "capacity"),
    *_columns(Text, "run_id", nullable=True),
    *_columns(Float, "started_at", "seen_at", "lease_until"),
    *_columns(LargeBinary, "leaves"),
)

keys = Table(
    "keys",
    metadata,
    Column("digest", LargeBinary, primary_key=True),
    _reference("attempt_id", "attempts.id"),
    *_columns(LargeBinary, "sampling", "budget"),
    *_columns(Float, "created_at"),
    *_columns(Float, "expires_at", "revoked_at", nullable=True),
    UniqueConstraint("attempt_id", name="keys_once"),
)

rewards = Table(
    "rewards",
    metadata,
    _reference("attempt_id", "attempts.id", primary_key=True),
    *_columns(Float, "reward"),
    *_columns(Text, "reason"),
    _reference("verdict_id", "blobs.id"),
    Column("integrity", Text, server_default=text("'clean'"), nullable=False),
    *_columns(Text, "review", nullable=True),
)

logs = Table(
    "logs",
    metadata,
    _reference("attempt_id", "attempts.id", primary_key=True),
    Column("name", Text, primary_key=True),
    _reference("blob_id", "blobs.id"),
)

# The columns from `skeleton_id` to `logprobs` are the contents: the request as skeleton + system + tools +
# conversation, and the tokens. The prompt consists of the first `shared` bytes of the base call's prompt +
# completion, followed by `suffix`. A call without tokens only has the base, by which the next call finds the
# tokens before it.
calls = Table(
    "calls",
    metadata,
    Column("key", Integer, primary_key=True),
    Column("id", Text, nullable=False, unique=True),
    _reference("attempt_id", "attempts.id"),
    *_columns(Integer, "sequence"),
    *_columns(Text, "dialect", "requested_model", "backend", "backend_model", "status"),
    *_columns(Float, "started_at", "ended_at"),
    *_columns(Text, "parent_id", "session_id", "agent_id", "policy_version", "finish_reason", nullable=True),
    *_columns(Integer, "prompt_tokens", "completion_tokens", "cached_tokens"),
    *_columns(LargeBinary, "sampling"),
    *_columns(LargeBinary, "error", nullable=True),
    _reference("skeleton_id", "blobs.id"),
    _reference("system_id", "blobs.id", nullable=True),
    _reference("tools_id", "blobs.id", nullable=True),
    *_columns(Integer, "node_id"),
    _reference("response_id", "blobs.id"),
    _reference("base_key", "calls.key", nullable=True),
    *_columns(Integer, "prompt_count", "shared", nullable=True),
    *_columns(LargeBinary, "suffix", nullable=True),
    *_columns(Integer, "completion_count", nullable=True),
    *_columns(LargeBinary, "completion", "logprobs", nullable=True),
    Column("cache_write_tokens", Integer, server_default=text("0"), nullable=False),
    *_columns(Float, "cost_usd", nullable=True),
    *_columns(LargeBinary, "policy_spans", "audit", nullable=True),
    Index("calls_in_order", "attempt_id", "sequence", unique=True),
)

token_values = Table(
    "token_values",
    metadata,
    Column("step", Integer, primary_key=True),
    _reference("call_id", "calls.id", primary_key=True),
    *_columns(Text, "version"),
    *_columns(LargeBinary, "logprobs", "ratios", "advantages"),
)

votes = Table(
    "votes",
    metadata,
    *(Column(name, Text, primary_key=True) for name in ("subject", "subject_id", "voter")),
    *_columns(Text, "label", "note"),
    *_columns(Float, "voted_at"),
    CheckConstraint("subject IN ('rollout', 'pair')", name="votes_subject"),
)

sources = Table(
    "sources",
    metadata,
    Column("path", Text, primary_key=True),
    *_columns(Text, "batch"),
    *_columns(Integer, "size", "modified_ns"),
    *_columns(Text, "reader"),
    *_columns(Float, "read_at"),
    Index("sources_of_batch", "batch"),
)

traces = Table(
    "traces",
    metadata,
    Column("key", Integer, primary_key=True),
    Column("id", Text, nullable=False, unique=True),
    *_columns(Text, "session_id", "format", "source", "role"),
    *_columns(Text, "project", "agent", "version", nullable=True),
    *_columns(LargeBinary, "parent", "outcome", nullable=True),
    *_columns(LargeBinary, "losses"),
    _reference("system_id", "blobs.id", nullable=True),
    _reference("tools_id", "blobs.id", nullable=True),
    *_columns(Float, "read_at"),
    *_columns(Text, "tools_source", nullable=True),
    *_columns(Integer, "tools_bytes", "tools_escaped", nullable=True),
)

turns = Table(
    "turns",
    metadata,
    Column("state_id", Text, primary_key=True),
    _reference("trace_key", "traces.key"),
    *_columns(Integer, "position"),
    *_columns(Text, "message_id"),
    *_columns(Integer, "node_id"),
    *_columns(Integer, "answer_id", nullable=True),
    _reference("action_id", "blobs.id"),
    *_columns(Text, "branch", "fidelity", "notes"),
    *_columns(Text, "model", "family", "timestamp", nullable=True),
    _reference("system_id", "blobs.id", nullable=True),
    _reference("tools_id", "blobs.id", nullable=True),
    *_columns(Integer, "tool_calls", "tool_errors", "denied", "interrupted"),
    *_columns(Text, "tests", nullable=True),
    *_columns(Integer, "edits"),
    *_columns(Integer, "edits_survived", nullable=True),
    *_columns(Integer, "commits"),
    *_columns(Text, "feedback", nullable=True),
    *_columns(Integer, "prompt_bytes", "prompt_escaped", "prompt_messages", "prompt_images", nullable=True),
    *_columns(Integer, "answer_chars", nullable=True),
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
    _reference("replay_id", "replays.id"),
    _reference("state_id", "turns.state_id"),
    *_columns(Text, "kind", "teacher", "model"),
    *_columns(Text, "family", nullable=True),
    *_columns(Integer, "number"),
    *_columns(Text, "status"),
    *_columns(Float, "reserved_usd", "cost_usd", nullable=True),
    *_columns(Text, "call_id", nullable=True),
    *_columns(LargeBinary, "error", nullable=True),
    *_columns(Float, "asked_at"),
    *_columns(Float, "ended_at", nullable=True),
    CheckConstraint("kind IN ('teacher', 'judge')", name="asks_kind"),
    CheckConstraint("status IN ('asked', 'answered', 'failed')", name="asks_status"),
    Index("asks_of_state", "state_id"),
)
