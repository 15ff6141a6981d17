"""Alembic runs this to migrate; the connection, with its transaction, comes from `database.py`."""

from __future__ import annotations

from alembic import context

from understudy.store.schema import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
context.run_migrations()
