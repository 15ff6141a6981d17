"""Users' expressions over the states of sessions: SQLite SQL, restricted to these tables and bounded in time
and memory.
"""

from __future__ import annotations

import hashlib
import math
import sqlite3
import time
from collections.abc import Sequence
from typing import Any, Final

from understudy.errors import ConfigError

PATIENCE_S: Final = 60.0
"""How long an expression may run, in seconds: far longer than any reasonable one needs for millions of turns."""

_OF_TURN = (
    "state_id", "message_id", "position", "branch", "fidelity", "notes", "model", "family", "timestamp",
    "tool_calls", "tool_errors", "denied", "interrupted", "tests", "edits", "edits_survived",
    "commits", "feedback",
)  # fmt: skip
_OF_TRACE = ("session_id", "format", "source", "role", "project", "agent", "version")
_OF_OUTCOME = ("resolved", "reward", "task", "exit_status")

COLUMNS: Final = (*_OF_TURN, "trace_id", *_OF_TRACE, *_OF_OUTCOME)
"""What an expression can refer to, and what a table of turns can show."""

_OF_SIZE = ("prompt_bytes", "prompt_escaped", "prompt_messages", "prompt_images", "answer_chars")
_VIEW = ", ".join(
    (
        "turns.trace_key",
        "turns.rowid AS turn_key",
        *(f"turns.{name}" for name in _OF_TURN),
        "traces.id AS trace_id",
        *(f"traces.{name}" for name in _OF_TRACE if name != "agent"),
        "COALESCE(traces.agent, traces.format) AS agent",  # logs of Claude Code name only agents that it started
        *(f"turns.{name}" for name in _OF_SIZE),
        *(f"traces.{name}" for name in ("tools_source", "tools_bytes", "tools_escaped")),
        "COALESCE(turns.tools_id, traces.tools_id) IS NOT NULL AS is_logged",
        *(f"json_extract(CAST(traces.outcome AS TEXT), '$.{name}') AS {name}" for name in _OF_OUTCOME),
    )
)
_QUERY = (
    "SELECT {columns} FROM (SELECT {view} FROM turns JOIN traces ON traces.key = turns.trace_key) "
    "WHERE (\n{where}\n) {order}LIMIT {limit}"
)
_SAMPLE = (
    "turn_key IN (SELECT turn_key FROM (SELECT {view} FROM turns JOIN traces ON traces.key = turns.trace_key) "
    "WHERE (\n{where}\n) ORDER BY sample_rank(state_id), state_id LIMIT {limit})"
)
_ORDER = "ORDER BY trace_key, position, turn_key "

_READABLE = frozenset({"turns", "traces", ""})
_ALLOWED = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_FUNCTION})
_FORBIDDEN = frozenset({"load_extension", "readfile", "writefile", "edit", "fts3_tokenizer"})
_STEPS = 20_000
_MAX_VALUE_BYTES = 64 << 20  # limit on the size of one value in bytes, so that no expression can fill the memory


def restrict_to_turns(raw: sqlite3.Connection) -> None:
    """Restrict a connection to reading the session tables, and limit the size of its values."""
    raw.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
    raw.set_authorizer(_authorize)


def sample_rank(id: str | bytes, seed: int) -> int:
    """Return a pseudo-random number for a state or task id. A sample of size n consists of the n lowest numbers.

    So the same seed gives the same sample, and a larger sample contains a smaller one.
    """
    data = id.encode(errors="surrogatepass") if isinstance(id, str) else id
    return int.from_bytes(hashlib.blake2b(b"%d:%b" % (seed, data), digest_size=8).digest()) >> 1


def select_turns(
    raw: sqlite3.Connection,
    columns: Sequence[str],
    where: str | None,
    limit: int | None,
    patience_s: float = PATIENCE_S,
    *,
    seed: int | None = None,
    group: str | None = None,
) -> list[tuple[Any, ...]]:
    """Return columns of the turns that match an expression, in order: the first `limit` or, with `seed`, a sample.

    `group`, one of `COLUMNS`, gives one row for each of its values, those with most turns first. Raises
    ConfigError like `SessionRepository.select`.
    """
    if where is not None and not where.strip():
        raise _invalid_where(where, "it is empty")
    deadline = math.inf if where is None else time.monotonic() + patience_s
    raw.set_progress_handler(lambda: time.monotonic() > deadline, _STEPS)
    order = "" if any("(" in column for column in columns) else _ORDER
    if group is not None:
        order = f"GROUP BY {group} ORDER BY count(*) DESC, {group} "
    condition = where or "1"
    if seed is not None and limit is not None:

        def rank(state_id: str | bytes) -> int:
            return sample_rank(state_id, seed)

        raw.create_function("sample_rank", 1, rank, deterministic=True)
        condition = _SAMPLE.format(view=_VIEW, where=condition, limit=limit)
    query = _QUERY.format(
        columns=", ".join(columns),
        view=_VIEW,
        where=condition,
        order=order,
        limit=-1 if limit is None else limit,
    )
    try:
        return raw.execute(query).fetchall()
    except sqlite3.OperationalError as error:
        is_late = str(error) == "interrupted"
        if is_late and time.monotonic() <= deadline:
            # Ctrl-C was raised inside SQLite's progress handler, where SQLite swallows exceptions; raise it again.
            raise KeyboardInterrupt from error
        if where is None:
            raise
        raise _invalid_where(where, f"it takes longer than {patience_s:g} s" if is_late else str(error)) from error
    except (sqlite3.DatabaseError, sqlite3.Warning, sqlite3.ProgrammingError, UnicodeEncodeError) as error:
        if where is None:
            raise
        raise _invalid_where(where, str(error)) from error


def _authorize(action: int, table: str | None, function_name: str | None, *_: Any) -> int:
    if action == sqlite3.SQLITE_READ and (table or "") in _READABLE:
        return sqlite3.SQLITE_OK
    if action in _ALLOWED and (function_name or "").lower() not in _FORBIDDEN:
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_DENY


def _invalid_where(where: str, reason: str) -> ConfigError:
    # Use only the first line: the others quote our own query around the expression.
    reason = reason.partition("\n")[0].rstrip(".")
    if reason.startswith('near ")"') and ")" not in where:  # the bracket is that of our own query
        reason = "the expression is not complete"
    return ConfigError(
        f"{where!r} cannot select states: {reason}. Give an SQL expression over the columns {', '.join(COLUMNS)}; "
        "for example: family = 'claude' AND tool_errors = 0"
    )
