"""Alembic runs this module to migrate. The connection, with its transaction, comes from `store/migrate.py`."""

from __future__ import annotations

from alembic import context

from understudy.store.schema import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
context.run_migrations()
