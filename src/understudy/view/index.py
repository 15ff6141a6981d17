"""A disposable index of a store's rollouts: a file in the cache, for filtering, sorting and searching lists.

The store is never written to. Its changes are read before a list is answered (`RolloutIndex.refresh`). An index
that is missing, damaged or of another format is rebuilt.
"""

from __future__ import annotations

import re
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from understudy.errors import StoreError
from understudy.grade.reports import current_reason
from understudy.redact.redactor import json_strings
from understudy.store import Store
from understudy.store.database import read_error
from understudy.store.outcomes import ChangeMark, ListedRollout
from understudy.types import SOLVED_REWARD
from understudy.view.faults import ViewRefused
from understudy.view.paging import (
    MAX_ROW_BYTES,
    decode_cursor,
    encode_cursor,
    invalid_cursor,
    rows_that_fit,
    shortened,
    size_of,
)
from understudy.view.routes import RolloutFilter, TaskGridQuery
from understudy.view.schema.rollouts import RolloutPage, RolloutRow, TaskGridPage, TaskGridRow, TaskSample

_INDEX_FORMAT: Final = 5
"""The format of the index. Raise it with any change of the tables: indexes in another format are rebuilt."""
_BATCH_ROLLOUTS: Final = 2_000
_SEARCH_TIME_LIMIT_S: Final = 1.5
"""For how many seconds a search reads transcripts that are not in the index yet."""
_MAX_TEXT_CHARACTERS: Final = 2_000_000
_NOT_SEARCHED: Final = (None, "type", "role", "id", "tool_use_id", "model", "stop_reason")
"""Fields whose texts are not a transcript's."""
_MAX_LABELS: Final = 20
"""How many of a rollout's labels a row has: the most frequent ones."""
_LOWEST_NUMBER: Final = "-1e308"
_PENDING_STATUSES: Final = "'preparing', 'running'"

_COLUMNS: Final = (
    "id", "run_id", "task_id", "sample_index", "agent", "status", "attempts", "created_at", "updated_at",
    "reward", "reason", "integrity", "reviewed", "turns", "prompt_tokens", "completion_tokens", "cost_usd",
    "seconds", "error", "attempt_id",
)  # fmt: skip
_SORT: Final = {
    "created": "created_at",
    "updated": "updated_at",
    "task": "substr(task_id, 1, 300) || char(9) || printf('%09d', sample_index)",
    "status": "status",
    "reward": f"COALESCE(reward, {_LOWEST_NUMBER})",
    "turns": "turns",
    "prompt_tokens": "prompt_tokens",
    "completion_tokens": "completion_tokens",
    "cost": "cost_usd",
    "seconds": f"COALESCE(seconds, {_LOWEST_NUMBER})",
    "attempts": "attempts",
}
_TABLES: Final = (
    "CREATE TABLE facts (name TEXT PRIMARY KEY, value BLOB)",
    f"CREATE TABLE rollouts (key INTEGER PRIMARY KEY, {', '.join(_COLUMNS)}, searched TEXT, UNIQUE (id))",
    *(f"CREATE INDEX by_{name} ON rollouts ({expression})" for name, expression in _SORT.items()),
    "CREATE INDEX of_task ON rollouts (task_id, agent, run_id, sample_index)",
    "CREATE VIRTUAL TABLE transcripts USING fts5(body)",
)
_UPSERT: Final = (
    f"INSERT INTO rollouts ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' for _ in _COLUMNS)}) "
    f"ON CONFLICT (id) DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in _COLUMNS[1:])}"
)
_PHRASE_OR_WORD: Final = re.compile(r'"([^"]*)"|(\S+)')


class RolloutIndex:
    """The index of one store, in `file`, or in memory if that cannot be written. Safe to use from many threads."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._database: sqlite3.Connection | None = None
        self._stamp: object = None

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._database is not None:
                self._database.close()
                self._database = None

    # --- keeping it up to date -------------------------------------------------------------------------

    def refresh(self, store: Store, stamp: object, identity: str) -> None:
        """Read what changed in the store.

        `stamp` differs after every change of the store; `identity` identifies its file.
        """
        with self._lock:
            if self._database is not None and stamp == self._stamp:
                return
            try:
                self._refresh(store, identity)
            except sqlite3.DatabaseError:
                # The cache was damaged or removed meanwhile. Its contents can always be rebuilt.
                self._remove()
                self._refresh(store, identity)
            self._stamp = stamp

    def _refresh(self, store: Store, identity: str) -> None:
        database = self._open(identity)
        fact = database.execute("SELECT value FROM facts WHERE name = 'mark'").fetchone()
        before = ChangeMark() if fact is None else msgspec.json.decode(fact[0], type=ChangeMark)
        changed, mark = store.outcomes.changed(before)
        if mark.rollouts < before.rollouts or mark.verdict_id < before.verdict_id:
            # Rollouts were removed, and their numbers may have been reused.
            self._remove()
            database = self._open(identity)
            changed, mark = store.outcomes.changed()
        # The rollout was unfinished when it was last read, so it will certainly change. The clocks of several
        # machines may differ by more than `changed` allows for.
        pending = database.execute(f"SELECT id FROM rollouts WHERE status IN ({_PENDING_STATUSES})").fetchall()
        # Rollouts that were created at the same time are listed in the order of their keys: that of their ids.
        ids = sorted({*changed, *(key for (key,) in pending)})
        for start in range(0, len(ids), _BATCH_ROLLOUTS):
            listed = sorted(
                store.outcomes.listed(ids[start : start + _BATCH_ROLLOUTS]), key=lambda rollout: rollout.id
            )
            database.execute("BEGIN IMMEDIATE")
            database.executemany(_UPSERT, [_row_values(rollout) for rollout in listed])
            database.execute("COMMIT")
        database.execute("INSERT OR REPLACE INTO facts VALUES ('mark', ?)", (msgspec.json.encode(mark),))

    def _open(self, identity: str) -> sqlite3.Connection:
        if self._database is None:
            self._database = self._connect()
        database = self._database
        expected = f"{_INDEX_FORMAT} {identity}".encode()
        try:
            existing = database.execute("SELECT value FROM facts WHERE name = 'identity'").fetchone()
        except sqlite3.OperationalError:
            existing = None
        if existing is None or existing[0] != expected:
            database.close()
            self._remove()
            self._database = database = self._connect()
            database.execute("BEGIN IMMEDIATE")
            for statement in _TABLES:
                database.execute(statement)
            database.execute("INSERT INTO facts VALUES ('identity', ?)", (expected,))
            database.execute("COMMIT")
        return database

    def _connect(self) -> sqlite3.Connection:
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            database = sqlite3.connect(self._file, isolation_level=None, check_same_thread=False, timeout=30)
            self._file.chmod(0o600)
        except (OSError, sqlite3.Error):
            database = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        # No durability: an index that a power cut destroys is rebuilt.
        for pragma in ("journal_mode = WAL", "synchronous = OFF", "cache_size = -16384", "temp_store = MEMORY"):
            database.execute(f"PRAGMA {pragma}")
        return database

    def _remove(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None
        for suffix in ("", "-wal", "-shm"):
            self._file.with_name(self._file.name + suffix).unlink(missing_ok=True)

    # --- reading ---------------------------------------------------------------------------------------

    def page(self, store: Store, query: RolloutFilter, labels: dict[str, dict[str, int]]) -> RolloutPage:
        """Return a page of the rollouts that match a filter. `labels` are the votes on rollouts by id and label.

        Raises ViewRefused for an invalid cursor.
        """
        with self._lock:
            database = self._connection()
            unsearched = 0 if query.q is None else self._index_more_transcripts(database, store)
            where, values = _conditions(query, labels)
            ((total,),) = database.execute(f"SELECT count(*) FROM rollouts WHERE {where}", values).fetchall()
            expression = _SORT[query.sort]
            sign, order = ("<", "DESC") if query.descending else (">", "ASC")
            if query.cursor is not None:
                where += f" AND ({expression}, key) {sign} (?, ?)"
                values = [*values, *decode_cursor(query.cursor)]
            rows = database.execute(
                f"SELECT {expression}, key, {', '.join(_COLUMNS)} FROM rollouts WHERE {where} "
                f"ORDER BY {expression} {order}, key {order} LIMIT ?",
                (*values, query.limit + 1),
            ).fetchall()
            page_rows = rows_that_fit(
                [_row(row[2:], labels) for row in rows[: query.limit]], MAX_ROW_BYTES - 4_000
            )
            if query.q is not None:
                page_rows, matches = _with_matches(database, query.q, page_rows)
            else:
                matches = dict[str, str]()
        count = len(page_rows)
        more = len(rows) > count
        after = encode_cursor(rows[count - 1][0], rows[count - 1][1]) if more and count else None
        return RolloutPage(rollouts=page_rows, total=total, next=after, unsearched=unsearched, matches=matches)

    def tasks(self, query: TaskGridQuery) -> TaskGridPage:
        """Return a page of the grid of tasks and samples."""
        where, values = "1", list[Any]()
        if query.run is not None:
            where, values = "run_id = ?", [query.run]
        if query.task is not None:
            where, values = f"{where} AND instr(task_id, ?)", [*values, query.task]
        with self._lock:
            database = self._connection()
            ((total,),) = database.execute(
                f"SELECT count(DISTINCT task_id) FROM rollouts WHERE {where}", values
            ).fetchall()
            after, first = _page_start(database, query.cursor)
            names = database.execute(
                f"SELECT task_id, min(key) FROM rollouts WHERE {where} AND task_id {'>=' if first else '>'} ? "
                "GROUP BY task_id ORDER BY task_id LIMIT ?",
                (*values, after, query.limit + 1),
            ).fetchall()
            rows: list[TaskGridRow] = []
            room, position = MAX_ROW_BYTES, None
            for name, key in names[: query.limit]:
                start = first if name == after else 0
                row = _task_row(database, name, where, values, start)
                if (size := size_of(row) + 1) > room and not rows:
                    samples = rows_that_fit(row.samples, MAX_ROW_BYTES // 2)
                    if len(samples) < len(row.samples):
                        position = encode_cursor(key, start + len(samples))
                    row = msgspec.structs.replace(
                        row, task_id=shortened(name, MAX_ROW_BYTES // 4), samples=samples
                    )
                elif size > room:
                    break
                rows.append(row)
                room -= size
                if position is not None:
                    break
        if position is None and len(names) > len(rows) > 0:
            position = encode_cursor(names[len(rows) - 1][1], 0)
        return TaskGridPage(tasks=tuple(rows), total=total, next=position)

    def rows_of(self, task_id: str | None = None, run_id: str | None = None) -> list[RolloutRow]:
        """Return the rollouts of a task, or of a run, or all."""
        conditions = {"task_id = ?": task_id, "run_id = ?": run_id}
        chosen = {condition: value for condition, value in conditions.items() if value is not None}
        with self._lock:
            rows = self._connection().execute(
                f"SELECT {', '.join(_COLUMNS)} FROM rollouts WHERE {' AND '.join(chosen) or '1'} "
                "ORDER BY run_id, task_id, agent, sample_index",
                list(chosen.values()),
            )
            return [_row(row, {}) for row in rows.fetchall()]

    def row(self, rollout_id: str, labels: dict[str, dict[str, int]]) -> RolloutRow | None:
        """Return a rollout by its id."""
        with self._lock:
            query = f"SELECT {', '.join(_COLUMNS)} FROM rollouts WHERE id = ?"
            row = self._connection().execute(query, (rollout_id,)).fetchone()
        return None if row is None else _row(row, labels)

    def _connection(self) -> sqlite3.Connection:
        if self._database is None:
            raise StoreError(
                f"{self._file}: the index was closed, because the viewer is ending; restart `understudy view`"
            )
        return self._database

    # --- full text -------------------------------------------------------------------------------------

    def _index_more_transcripts(self, database: sqlite3.Connection, store: Store) -> int:
        """Index more transcripts for a limited time. Returns how many rollouts are not indexed yet."""
        until = time.monotonic() + _SEARCH_TIME_LIMIT_S
        not_indexed = "attempt_id IS NOT NULL AND searched IS NOT attempt_id || ' ' || turns"
        waiting = database.execute(
            f"SELECT key, attempt_id, attempt_id || ' ' || turns FROM rollouts WHERE {not_indexed} "
            "ORDER BY updated_at DESC"
        ).fetchall()
        indexed = 0
        for key, attempt_id, state in waiting:
            if indexed and time.monotonic() > until:
                break
            text = _searchable_text(store.calls.contents(attempt_id))
            database.execute("BEGIN IMMEDIATE")
            database.execute("DELETE FROM transcripts WHERE rowid = ?", (key,))
            database.execute("INSERT INTO transcripts (rowid, body) VALUES (?, ?)", (key, text))
            database.execute("UPDATE rollouts SET searched = ? WHERE key = ?", (state, key))
            database.execute("COMMIT")
            indexed += 1
        return len(waiting) - indexed


def _row_values(rollout: ListedRollout) -> tuple[Any, ...]:
    error = None if rollout.error is None else msgspec.json.encode(rollout.error).decode()
    # Worded like the health of a run, whose reasons link to the rollouts that have them.
    reason = None if rollout.reward is None else current_reason(rollout.reason or "no reason given")
    plain = {"agent": str(rollout.agent), "error": error, "reason": reason, "reviewed": int(rollout.reviewed)}
    return tuple(plain[name] if name in plain else getattr(rollout, name) for name in _COLUMNS)


def _row(values: Sequence[Any], labels: dict[str, dict[str, int]]) -> RolloutRow:
    fields = dict(zip(_COLUMNS, values, strict=True))
    error = fields.pop("error")
    del fields["attempt_id"], fields["created_at"]
    fields["reviewed"] = bool(fields["reviewed"])
    return RolloutRow(
        **fields,
        error=read_error(error),
        labels=dict(Counter(labels.get(fields["id"], {})).most_common(_MAX_LABELS)),
    )


def _page_start(database: sqlite3.Connection, cursor: str | None) -> tuple[str, int]:
    """Return the task after which a page of the grid begins, or in which it begins, at a sample above 0.

    A cursor has a rollout of the task, because ids of tasks may be of any length.
    """
    if cursor is None:
        return "", 0
    key, sample = decode_cursor(cursor)
    task = database.execute("SELECT task_id FROM rollouts WHERE key = ?", (key,)).fetchone()
    if task is None or not isinstance(sample, int) or sample < 0:
        raise invalid_cursor(cursor)
    return task[0], sample


def _task_row(
    database: sqlite3.Connection, task_id: str, where: str, values: Sequence[Any], first: int
) -> TaskGridRow:
    """Return a task with its samples, from number `first` on."""
    rows = database.execute(
        f"SELECT id, sample_index, agent, status, reward, integrity FROM rollouts WHERE {where} AND task_id = ? "
        "ORDER BY agent, run_id, sample_index",
        (*values, task_id),
    ).fetchall()
    samples = tuple(
        TaskSample(
            rollout_id=row[0], sample_index=row[1], agent=row[2], status=row[3], reward=row[4], integrity=row[5]
        )
        for row in rows
    )
    graded = [sample.reward for sample in samples if sample.reward is not None]
    solved = sum(reward >= SOLVED_REWARD for reward in graded)
    return TaskGridRow(task_id=task_id, solved=solved, graded=len(graded), samples=samples[first:])


def _conditions(query: RolloutFilter, labels: dict[str, dict[str, int]]) -> tuple[str, list[Any]]:
    """Return the SQL of a filter, and its parameters."""
    parts: list[tuple[str, tuple[Any, ...]]] = []
    for name, value in (("run_id", query.run), ("status", query.status), ("integrity", query.integrity)):
        if value is not None:
            parts.append((f"{name} = ?", (value,)))
    if query.agent is not None:
        parts.append(("agent = ?", (query.agent,)))
    if query.task is not None:
        parts.append(("instr(task_id, ?)", (query.task,)))
    if query.reason is not None:
        parts.append(("instr(coalesce(reason, '') || ' ' || coalesce(error, ''), ?)", (query.reason,)))
    if query.outcome == "ungraded":
        parts.append(("reward IS NULL", ()))
    elif query.outcome is not None:
        sign = ">=" if query.outcome == "solved" else "<"
        parts.append((f"reward {sign} {SOLVED_REWARD}", ()))
    if query.label is not None:
        ids = [key for key, counts in labels.items() if query.label in counts]
        parts.append(("id IN (SELECT value FROM json_each(?))", (msgspec.json.encode(ids).decode(),)))
    if query.q is not None:
        expression = _full_text_query(query.q)
        parts.append(("key IN (SELECT rowid FROM transcripts WHERE transcripts MATCH ?)", (expression,)))
    where = " AND ".join(part for part, _ in parts) or "1"
    return where, [value for _, values in parts for value in values]


def _full_text_query(text: str) -> str:
    """Convert a user's query to an FTS5 expression in which every word, and every phrase in quotes, must occur."""
    terms = [quoted or word for quoted, word in _PHRASE_OR_WORD.findall(text)]
    terms = [term.replace('"', "").replace("\0", " ") for term in terms]  # SQLite ends an expression at a NUL
    phrases = [f'"{term}"' for term in terms if any(sign.isalnum() for sign in term)]
    if not phrases:
        raise ViewRefused(
            400, "query", f"q: nothing to search for in {text[:100]!r}", "give at least one word to search for"
        )
    return " AND ".join(phrases)


def _matches(database: sqlite3.Connection, text: str, ids: Sequence[str]) -> dict[str, str]:
    """Return the text around the first match in each of some rollouts."""
    rows = database.execute(
        "SELECT rollouts.id, snippet(transcripts, 0, '', '', '…', 24) FROM transcripts "
        "JOIN rollouts ON rollouts.key = transcripts.rowid WHERE transcripts MATCH ? "
        "AND rollouts.id IN (SELECT value FROM json_each(?))",
        (_full_text_query(text), msgspec.json.encode(list(ids)).decode()),
    )
    return {key: snippet[:500] for key, snippet in rows.fetchall()}


def _with_matches(
    database: sqlite3.Connection, text: str, rows: tuple[RolloutRow, ...]
) -> tuple[tuple[RolloutRow, ...], dict[str, str]]:
    """Return the rows that fit on a page with the texts around their matches, and these texts."""
    matches = _matches(database, text, [row.id for row in rows])
    room, count = MAX_ROW_BYTES, 0
    for row in rows:
        room -= size_of(row) + size_of({row.id: matches.get(row.id, "")}) + 1
        if room < 0 and count:
            break
        count += 1
    return rows[:count], {row.id: matches[row.id] for row in rows[:count] if row.id in matches}


def _searchable_text(contents: Iterable[bytes]) -> str:
    """Return all strings in some JSON values, up to a limit. Values that are not JSON are used as text."""
    parts: list[str] = []
    size = 0
    for content in contents:
        try:
            value = msgspec.json.decode(content)
            fields = json_strings(value)  # without the keys of objects
            strings = [text for text, name in fields if name not in _NOT_SEARCHED or text is value]
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            strings = [content.decode(errors="replace")]
        for text in strings:
            parts.append(text.encode(errors="replace").decode())
            size += len(text)
        if size > _MAX_TEXT_CHARACTERS:
            break
    return "\n".join(parts)[:_MAX_TEXT_CHARACTERS]
