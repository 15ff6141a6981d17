"""API keys of a gateway that runs alone, and the clients that they were issued to.

A client is an attempt without a rollout. It runs from its creation and never ends.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from sqlalchemy import and_, bindparam, delete, insert, select, update

from understudy.errors import StoreError
from understudy.store.database import (
    Repository,
    WriteContext,
    decode_object,
    encode,
    json_column,
    queued,
    row_reader,
)
from understudy.store.runs import insert_attempt, read_attempt
from understudy.store.schema import attempts, keys
from understudy.store.statements import HotStatement
from understudy.types import Attempt

CLIENT = "client-"
"""The prefix of a client's attempt id; the rest is its name."""

_MAX_NAME_CHARS = 200
_NOTHING: Mapping[str, Any] = {}
# This runs with every request, in a third of the time that SQLAlchemy Core needs.
_FIND = HotStatement(select(keys).where(keys.c.digest == bindparam("digest")), "digest")
_COLUMNS = tuple(keys.c.keys())


class StoredKey(Struct, frozen=True, kw_only=True):
    """A key as it is stored: only its hash, with what it allows. Times are Unix seconds.

    A key that expired or was revoked stays in the store, so the reader must check whether it is still valid.
    """

    digest: bytes
    attempt_id: str
    sampling: dict[str, Any]
    budget: dict[str, Any]
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None


_key = row_reader(StoredKey, sampling=decode_object, budget=decode_object)


class KeyRepository(Repository):
    """`Store.keys`: API keys by hash, and the clients that have them."""

    @queued
    def add_client(self, context: WriteContext, name: str) -> Attempt:
        """Create a client, unless it exists. Returns its attempt, which has no rollout and does not end."""
        if not name or not name.isprintable() or name != name.strip() or len(name) > _MAX_NAME_CHARS:
            raise StoreError(
                f"invalid client name {name[:_MAX_NAME_CHARS]!r}; give 1 to {_MAX_NAME_CHARS} printable "
                "characters, without a space at either end"
            )
        attempt_id = CLIENT + name
        query = select(attempts).where(attempts.c.id == attempt_id)
        if (row := context.connection.execute(query).mappings().one_or_none()) is None:
            return insert_attempt(context, attempt_id, None, 1, "running")
        existing = read_attempt(row)
        if existing.rollout_id is not None:
            raise StoreError(
                f"{attempt_id} is already an attempt of rollout {existing.rollout_id}; choose another name "
                "for the client"
            )
        return existing

    def clients(self) -> list[Attempt]:
        """Return the attempts that have no rollout, oldest first."""
        without_rollout = select(attempts).where(attempts.c.rollout_id.is_(None))
        return self._read_all(without_rollout.order_by(attempts.c.started_at, attempts.c.id), read_attempt)

    @queued
    def add(
        self,
        context: WriteContext,
        digest: bytes,
        attempt_id: str,
        *,
        sampling: Mapping[str, Any] = _NOTHING,
        budget: Mapping[str, Any] = _NOTHING,
        expires_at: float | None = None,
    ) -> None:
        """Store the hash of an attempt's key, and what the key allows, in place of a revoked or expired one.

        Raises StoreError if the attempt has a valid key.
        """
        now = time.time()
        query = select(keys).where(keys.c.attempt_id == attempt_id)
        if (existing := context.connection.execute(query).one_or_none()) is not None:
            expired = existing.expires_at is not None and existing.expires_at <= now
            if existing.revoked_at is None and not expired:
                raise StoreError(
                    f"attempt {attempt_id} already has a valid key, expected one per attempt; revoke it before "
                    "issuing another: understudy gateway revoke NAME"
                )
            context.connection.execute(delete(keys).where(keys.c.attempt_id == attempt_id))
        values = {
            "digest": digest,
            "attempt_id": attempt_id,
            "sampling": json_column(encode, dict(sampling), f"the sampling of the key of {attempt_id}"),
            "budget": json_column(encode, dict(budget), f"the budget of the key of {attempt_id}"),
            "created_at": now,
            "expires_at": expires_at,
        }
        context.connection.execute(insert(keys).values(values))

    @queued
    def revoke(self, context: WriteContext, attempt_id: str) -> bool:
        """Revoke an attempt's key. Returns False if there is none, or if it was revoked before."""
        valid = and_(keys.c.attempt_id == attempt_id, keys.c.revoked_at.is_(None))
        change = update(keys).where(valid).values(revoked_at=time.time())
        return context.connection.execute(change).rowcount == 1

    def find(self, digest: bytes) -> StoredKey | None:
        """Return the key with this hash, even if it expired or was revoked; None if there is none."""
        driver = self._database.driver
        with driver.errors():
            row = driver.fetch_one(_FIND, (digest,))
            return None if row is None else _key(dict(zip(_COLUMNS, row, strict=True)))

    def all(self) -> list[StoredKey]:
        """Return all keys, oldest first, including expired and revoked ones."""
        return self._read_all(select(keys).order_by(keys.c.created_at, keys.c.attempt_id), _key)
