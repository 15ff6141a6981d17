"""The lock on a store in PostgreSQL: shared by all who have it open, or held by one process alone.

It is an advisory lock, and ends with its connection. Releases that do not know the lock are recognised by the
names of their connections.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from understudy import __version__
from understudy.errors import StoreInUse

if TYPE_CHECKING:
    import psycopg

CLIENT_NAME = f"understudy {__version__}"
"""The name of connections that know the lock. Those of earlier releases are named `understudy`."""

_LOCK = "hashtext('understudy store in use'), hashtext(current_schema())"
_EARLIER = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'understudy'"
)
_HOLDERS = "SELECT id FROM workers WHERE lease_until >= extract(epoch FROM clock_timestamp()) ORDER BY id LIMIT 3"
_END_S = 1.0
"""How long the server may take to end closed connections, in seconds."""


def share(connection: psycopg.Connection[Any]) -> None:
    """Take the lock shared, until the connection ends. Waits while another process holds it exclusively."""
    connection.execute(f"SELECT pg_advisory_lock_shared({_LOCK})")


def take_alone(connection: psycopg.Connection[Any], name: str) -> None:
    """Take the lock of the store `name` exclusively, until the connection ends. Raises StoreInUse if others have
    it open.
    """
    end = time.monotonic() + _END_S
    while True:
        try:
            row = connection.execute(f"SELECT pg_try_advisory_lock({_LOCK})").fetchone()
            if row is None or not row[0]:
                raise StoreInUse(
                    f"{name} is in use: other processes have it open (a run, a worker, a gateway, an export or a "
                    "viewer; `understudy status` names workers); end them, then run the same command again"
                )
            refuse_earlier_releases(connection, name)
            return
        except StoreInUse:
            if time.monotonic() > end:
                raise
        time.sleep(0.05)


def refuse_earlier_releases(connection: psycopg.Connection[Any], name: str) -> None:
    """Raise StoreInUse while a release that does not know the lock has the store open."""
    row = connection.execute(_EARLIER).fetchone()
    if row is not None and row[0]:
        raise StoreInUse(
            f"{name} is in use: {row[0]} connections belong to an earlier release, which could write at the same "
            "time; end its processes, then run the same command again"
        )


def refuse_lease_holders(connection: psycopg.Connection[Any], name: str) -> None:
    """Raise StoreInUse while leases are alive: their holders continue even without a connection at the moment."""
    if holders := [row[0] for row in connection.execute(_HOLDERS)]:
        raise StoreInUse(
            f"{name} is in use: the leases of {', '.join(holders)} have not expired; end these processes, or, if "
            "they were killed, wait a minute, then run the same command again"
        )
