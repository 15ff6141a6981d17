"""Reads the sessions in OpenCode's database (`opencode.db`, SQLite), which is hostile input like any other log."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from understudy.ingest.json_values import mapping
from understudy.ingest.log_files import INSIDE, LogFile
from understudy.ingest.log_reader import MAX_LINE_BYTES, parse_json

_WAL, _SHARED_MEMORY = "-wal", "-shm"
"""What SQLite appends to a database's name for the files with its newest transactions and their index."""

MAGICS = (b"SQLite format 3\0", b"\x37\x7f\x06\x82", b"\x37\x7f\x06\x83", b"\x18\xe2\x2d\0")
"""What a database, its newest transactions (in either byte order) and their index begin with."""

_SESSIONS = (
    "SELECT id, parent_id, directory, version FROM session ORDER BY time_created, id",
    ("id", "parentID", "directory", "version"),
)
_MESSAGES = "SELECT id, data FROM message WHERE session_id = ? ORDER BY id"
_PARTS = "SELECT message_id, data FROM part WHERE session_id = ? ORDER BY id"
_TABLES = "SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name IN ('session', 'message', 'part')"

StoredSession = tuple[dict[str, Any], list[dict[str, Any]], Counter[str]]
"""The info of a session, its messages with their parts, as an export has them, and what could not be read."""


def database_of(path: str) -> str:
    """Return the path of the database that a file belongs to."""
    return path.removesuffix(_WAL).removesuffix(_SHARED_MEMORY)


def read_database(files: Sequence[LogFile]) -> Iterator[StoredSession]:
    """Yield the sessions of a database; `files` are those of `database_of` one path.

    Raises OSError if it is no database of OpenCode.
    """
    by_path = {file.path: file for file in files}
    database_file = by_path.get(path := database_of(files[0].path))
    if database_file is None:
        raise OSError(
            f"{files[0].path}: its database {path} is missing; copy both into one directory, or leave this file "
            "out"
        )
    try:
        with _opened(database_file, by_path.get(path + _WAL)) as database:
            query, names = _SESSIONS
            rows = [tuple(map(_text, row)) for row in database.execute(query)]
            for row in rows:
                yield _session(database, dict(zip(names, row, strict=True)))
    except sqlite3.Error as error:
        raise OSError(
            f"{database_file.path}: cannot be read as a database of OpenCode: {error}; copy it again, with its "
            "-wal file"
        ) from error


def _session(database: sqlite3.Connection, info: dict[str, Any]) -> StoredSession:
    losses: Counter[str] = Counter()
    messages: dict[str | None, dict[str, Any]] = {}
    try:
        for message_id, data in database.execute(_MESSAGES, (info["id"],)):
            ids = {"id": _text(message_id), "sessionID": info["id"]}
            messages[ids["id"]] = {"info": _object(data, losses) | ids, "parts": []}
        for owner, data in database.execute(_PARTS, (info["id"],)):
            message = messages.get(_text(owner))
            if message is None:
                losses["part_without_message"] += 1
            else:
                message["parts"].append(_object(data, losses))
    except sqlite3.Error:  # damaged pages, or a text that is too long
        losses["unreadable_rest"] += 1
    return info, list(messages.values()), losses


def _object(data: Any, losses: Counter[str]) -> dict[str, Any]:
    value = parse_json(data, losses) if isinstance(data, bytes) else data
    if not isinstance(value, dict):
        losses["not_an_object"] += value is not None or data is None
    return mapping(value)


def _text(value: Any) -> str | None:
    return value.decode(errors="replace") if isinstance(value, bytes) else None


@contextmanager
def _opened(file: LogFile, wal_file: LogFile | None) -> Generator[sqlite3.Connection]:
    """Open a database without writing any file beside it: in place while OpenCode has it open, otherwise as an
    immutable file, or as a copy if its latest transactions are in a separate log.
    """
    path = Path(file.path)
    in_use = path.with_name(path.name + _SHARED_MEMORY).exists()
    with tempfile.TemporaryDirectory(prefix="understudy-") as directory:
        if INSIDE in file.path or (wal_file is not None and wal_file.size and not in_use):
            path, in_use = Path(directory) / "copy.db", True
            for source, suffix in ((file, ""), (wal_file, _WAL)):
                if source is not None:
                    with source.open() as stream, path.with_name(path.name + suffix).open("wb") as copy:
                        shutil.copyfileobj(stream, copy)
        mode = "mode=ro" if in_use else "immutable=1"
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?{mode}", uri=True)) as database:
            database.text_factory = bytes
            database.execute("PRAGMA trusted_schema = OFF")
            database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_LINE_BYTES)
            if database.execute(_TABLES).fetchone() != (3,):
                raise OSError(
                    f"{file.path}: not a database of OpenCode; expected the tables "
                    "session, message and part: give its opencode.db"
                )
            yield database
