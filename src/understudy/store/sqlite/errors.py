"""Errors of SQLite and SQLAlchemy as StoreError: which file, what happened, what to do."""

from __future__ import annotations

import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from understudy.errors import StoreError

_HINTS = {
    "database or disk is full": "the disk is full: nothing of this write was stored and the store is intact; "
    "free some space, then run the same command again",
    "disk i/o error": "the disk reported an I/O error: nothing of this write was stored and the store is intact; "
    "check for a full disk, a quota, or a fault in the system log, then run the same command again",
    "database is locked": "another process held the store's lock for too long; "
    "find out which process has it open, then run the same command again",
    "readonly database": "the store is read-only for this user; make its directory and files writable",
    "unable to open database": "the store cannot be opened; check the owner and the mode of the directory",
    "file is not a database": "not an SQLite file; expected a store's directory, or restore it from a copy",
    "malformed": "the store is damaged; restore it from a copy",
}


def to_store_error(error: Exception, file: Path) -> StoreError:
    """The StoreError that says what happened to which file, and what to do next."""
    if isinstance(error, StoreError):
        return error
    cause: BaseException | Any = error.orig if isinstance(error, DBAPIError) else error
    text = str(cause)
    for sign, hint in _HINTS.items():
        if sign in text.lower():
            return StoreError(f"{file}: {hint} ({text})")
    if isinstance(cause, sqlite3.IntegrityError) and "FOREIGN KEY" in text:
        return StoreError(f"{file}: a row names a run, task, rollout or attempt that is not in the store ({text})")
    if isinstance(cause, sqlite3.IntegrityError) and "UNIQUE" in text:
        return StoreError(f"{file}: another row with the same key exists already ({text})")
    return StoreError(f"{file}: the store cannot be read or written: {type(cause).__name__}: {text}")


@contextmanager
def translate_errors(file: Path) -> Generator[None]:
    """Raise what SQLAlchemy, sqlite3 and msgspec raise inside as a StoreError that names the file."""
    try:
        yield
    except (SQLAlchemyError, sqlite3.Error, msgspec.MsgspecError) as error:
        raise to_store_error(error, file) from error
