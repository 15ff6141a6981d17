"""Alembic's migrations, run over a connection of either database."""

from __future__ import annotations

import threading
from pathlib import Path

from sqlalchemy import Connection

from understudy.store.schema import HEAD

MIGRATIONS = Path(__file__).parent / "migrations"

# Alembic's operations go through module-level proxies: one migration at a time in a process.
_migrating = threading.Lock()


def unknown_schema(version: str) -> str | None:
    """What is wrong with a store whose schema this release does not know; None where it does."""
    from alembic.script import ScriptDirectory

    revisions = {script.revision for script in ScriptDirectory(str(MIGRATIONS)).walk_revisions()}
    if version in revisions:
        return None
    return f"was written by a newer release (schema {version}; this one knows up to {HEAD}); update understudy"


def migrate_connection(connection: Connection, *, stamp: bool = False) -> None:
    """Bring a database up to the newest schema, within the connection's transaction.

    With `stamp` its tables were made as they are now, and it is only noted where it stands.
    """
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    with _migrating:
        (command.stamp if stamp else command.upgrade)(config, "head")
