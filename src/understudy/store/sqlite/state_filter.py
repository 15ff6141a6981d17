"""Choosing turns by an SQL expression that a person wrote: it can read two tables, and for so long."""

from __future__ import annotations

import math
import sqlite3
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from understudy.errors import ConfigError
from understudy.store.sqlite.engine import reading_uri
from understudy.store.sqlite.errors import translate_errors

PATIENCE_S: Final = 60.0
"""How long an expression is waited for: far longer than an honest one takes on millions of turns."""

_OF_TURN = (
    "state_id",
    "message_id",
    "position",
    "branch",
    "fidelity",
    "notes",
    "model",
    "family",
    "timestamp",
    "tool_calls",
    "tool_errors",
    "denied",
    "interrupted",
    "tests",
    "edits",
    "edits_survived",
    "commits",
    "feedback",
)
_OF_TRACE = ("session_id", "format", "source", "role", "project", "agent", "version")
_OF_OUTCOME = ("resolved", "reward", "task", "exit_status")

COLUMNS: Final = (*_OF_TURN, "trace_id", *_OF_TRACE, *_OF_OUTCOME)
"""What an expression can name, and a table of turns show."""

_VIEW = ", ".join(
    (
        "turns.trace_key",
        "turns.rowid AS turn_key",
        *(f"turns.{name}" for name in _OF_TURN),
        "traces.id AS trace_id",
        *(f"traces.{name}" for name in _OF_TRACE),
        *(f"json_extract(CAST(traces.outcome AS TEXT), '$.{name}') AS {name}" for name in _OF_OUTCOME),
    )
)
_QUERY = (
    "SELECT {columns} FROM (SELECT {view} FROM turns JOIN traces ON traces.key = turns.trace_key) "
    "WHERE (\n{where}\n) {order}LIMIT {limit}"
)
_ORDER = "ORDER BY trace_key, position, turn_key "

_READABLE = frozenset({"turns", "traces", ""})
_ALLOWED = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_FUNCTION})
_FORBIDDEN = frozenset({"load_extension", "readfile", "writefile", "edit", "fts3_tokenizer"})
_STEPS = 20_000
_LONGEST = 64 << 20  # bytes of one value: no expression fills the memory


@contextmanager
def filter_connection(file: Path) -> Generator[sqlite3.Connection]:
    """A connection that reads, of the tables of sessions alone."""
    with translate_errors(file):
        raw = sqlite3.connect(reading_uri(file), uri=True, isolation_level=None)
        try:
            raw.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST)
            raw.set_authorizer(_authorize)
            yield raw
        finally:
            raw.close()


def select_turns(
    raw: sqlite3.Connection,
    columns: Sequence[str],
    where: str | None,
    limit: int | None,
    patience_s: float = PATIENCE_S,
) -> list[tuple[Any, ...]]:
    """Columns of the turns that an expression is true of, in order. Raises ConfigError as `Sessions.choose`."""
    if where is not None and not where.strip():
        raise _wrong(where, "it is empty")
    until = math.inf if where is None else time.monotonic() + patience_s
    raw.set_progress_handler(lambda: time.monotonic() > until, _STEPS)
    order = "" if any("(" in column for column in columns) else _ORDER
    query = _QUERY.format(
        columns=", ".join(columns),
        view=_VIEW,
        where=where or "1",
        order=order,
        limit=-1 if limit is None else limit,
    )
    try:
        return raw.execute(query).fetchall()
    except sqlite3.OperationalError as error:
        late = str(error) == "interrupted"
        if late and time.monotonic() <= until:
            # Ctrl-C reached Python while SQLite asked whether to go on, and SQLite keeps what is raised there.
            raise KeyboardInterrupt from error
        if where is None:
            raise
        raise _wrong(where, f"it takes longer than {patience_s:g} s" if late else str(error)) from error
    except (sqlite3.DatabaseError, sqlite3.Warning, sqlite3.ProgrammingError, UnicodeEncodeError) as error:
        if where is None:
            raise
        raise _wrong(where, str(error)) from error


def _authorize(action: int, first: str | None, second: str | None, *_: Any) -> int:
    if action == sqlite3.SQLITE_READ and (first or "") in _READABLE:
        return sqlite3.SQLITE_OK
    if action in _ALLOWED and (second or "").lower() not in _FORBIDDEN:
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_DENY


def _wrong(where: str, reason: str) -> ConfigError:
    # The first line: others quote our own query, which stands around the expression.
    reason = reason.partition("\n")[0].rstrip(".")
    return ConfigError(
        f"{where!r} cannot choose states: {reason}. Give an SQL expression over the columns {', '.join(COLUMNS)}; "
        "for example: family = 'claude' AND tool_errors = 0"
    )
