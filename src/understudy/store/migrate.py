"""Runs Alembic's migrations over a connection to either kind of database."""

from __future__ import annotations

import threading
from pathlib import Path

from sqlalchemy import Connection

from understudy.store.schema import HEAD

MIGRATIONS = Path(__file__).parent / "migrations"

# Alembic's operations use module-level proxies, so only one migration can run at a time in a process.
_migrating = threading.Lock()


def unknown_schema(version: str) -> str | None:
    """Return what is wrong with a store whose schema this release does not know, or None if it is known."""
    from alembic.script import ScriptDirectory

    revisions = {script.revision for script in ScriptDirectory(str(MIGRATIONS)).walk_revisions()}
    if version in revisions:
        return None
    return f"was written by a newer release (schema {version}; this one knows up to {HEAD}); update understudy"


def migrate_connection(connection: Connection, *, stamp: bool = False) -> None:
    """Migrate a database to the newest schema, within the connection's transaction.

    `stamp`: its tables were created with the newest schema, so only the schema version is recorded.
    """
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    with _migrating:
        (command.stamp if stamp else command.upgrade)(config, "head")
