"""API keys in the store, and sessions that are restored from stored calls after a restart."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from understudy.errors import GatewayError, StoreError
from understudy.gateway.backends.base import RestorableBackend
from understudy.gateway.budget import Budget
from understudy.gateway.errors import BudgetExceeded
from understudy.gateway.keys import digest_of, new_key
from understudy.gateway.router import ModelRouter
from understudy.gateway.session import GatewaySession
from understudy.store import Store
from understudy.store.address import StoreUrl
from understudy.store.keys import StoredKey
from understudy.types import Call
from understudy.wire.dialect import Branch
from understudy.wire.dialects import DIALECTS
from understudy.wire.model import Generation
from understudy.wire.stored import read_response, sampled_calls

RECHECK_S = 1.0
"""How long a key still works after another process revoked it, in seconds."""
IDLE_S = 3600.0
"""After this many seconds without a request, a session is dropped. It is restored from the store when needed."""
TOGETHER = 64
"""How many calls are in memory at once while a session is restored, since a client may have made any number."""
SWEEP_S = 60.0
"""How often to look for expired entries, in seconds, because that goes over all keys."""


_log = logging.getLogger(__name__)


async def issue(
    store: Store, name: str, *, expires_at: float | None = None, budget: Mapping[str, Any] | None = None
) -> str:
    """Make a new key for the client `name`. Its older key stops working, and only the hash is stored.

    `expires_at` is in Unix seconds. Raises StoreError.
    """
    key = new_key()
    client = await asyncio.wrap_future(store.keys.add_client(name))
    await asyncio.wrap_future(store.keys.revoke(client.id))
    put = store.keys.add(digest_of(key), client.id, budget=budget or {}, expires_at=expires_at)
    await asyncio.wrap_future(put)
    return key


@dataclass
class _KeyLookup:
    """The result of looking up a key, and its time. `key` is None for an invalid key."""

    key: StoredKey | None
    at: float = field(default_factory=time.monotonic)


@dataclass
class _OpenSession:
    """A session, and the key with which it was last opened."""

    session: GatewaySession
    digest: bytes
    used_at: float = field(default_factory=time.monotonic)


class StoredKeys:
    """The keys in a store (see KeyRing). Sessions are restored from the stored calls.

    `sampling` overrides what agents request, and a key's own sampling overrides that. `budget` applies to attempts
    whose key has none.
    """

    def __init__(
        self, store: Store, models: ModelRouter, sampling: Mapping[str, Any], budget: Budget | None
    ) -> None:
        self._store = store
        self._models = models
        self._sampling = sampling
        self._budget = budget
        self._lookups: dict[bytes, _KeyLookup] = {}
        self._sessions: dict[str, _OpenSession] = {}
        self._swept_at = time.monotonic()
        # One lock per attempt, kept only while somebody waits, so that restoring a long session blocks no other.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def attempt(self, key: str) -> str | None:
        """Return the attempt that a key identifies, or None if it is wrong, revoked or expired.

        Raises GatewayError.
        """
        stored_key = await self._look_up(digest_of(key))
        return None if stored_key is None else stored_key.attempt_id

    async def find_session(self, key: str) -> GatewaySession | None:
        """See KeyRing. Raises GatewayError, or StoreError if the calls of an attempt cannot be read."""
        stored_key = await self._look_up(digest_of(key))
        if stored_key is None:
            return None
        open_session = self._usable_session(stored_key)
        if open_session is None:
            async with self._locks.setdefault(stored_key.attempt_id, asyncio.Lock()):
                open_session = self._usable_session(stored_key)  # another request may have opened it meanwhile
                if open_session is None:
                    open_session = _OpenSession(await self._restore(stored_key), stored_key.digest)
                    self._sessions[stored_key.attempt_id] = open_session
        open_session.used_at = time.monotonic()
        return open_session.session

    def _usable_session(self, key: StoredKey) -> _OpenSession | None:
        """Return the open session of a key's attempt, or None if it is idle and was opened with another key."""
        session = self._sessions.get(key.attempt_id)
        usable = session is not None and (session.digest == key.digest or session.session.in_flight > 0)
        return session if usable else None

    async def _look_up(self, digest: bytes) -> StoredKey | None:
        checked = self._lookups.get(digest)
        if checked is None or time.monotonic() - checked.at > RECHECK_S:
            self._drop_idle()
            try:
                # A file is read on the event loop: one row by key never blocks, and a thread costs five times as
                # much. A server may be unavailable for minutes, which would block everything else in this process.
                find, is_remote = self._store.keys.find, isinstance(self._store.location, StoreUrl)
                checked = _KeyLookup(await asyncio.to_thread(find, digest) if is_remote else find(digest))
            except StoreError as error:
                # No model was asked yet, so trying again does no harm.
                _log.error(
                    "an API key cannot be looked up, so its client is told to send the request again: %s", error
                )
                raise GatewayError(
                    "the gateway cannot look up API keys in its store; send the request again later, or see "
                    "the gateway's log"
                ) from error
            # invalid keys are not cached, because anybody can make up any number of them
            if checked.key is not None:
                self._lookups[digest] = checked
        key = checked.key
        if key is None or key.revoked_at is not None:
            return None
        return None if key.expires_at is not None and key.expires_at <= time.time() else key

    def _drop_idle(self) -> None:
        now = time.monotonic()
        if now - self._swept_at < SWEEP_S:
            return
        self._swept_at = now
        self._lookups = {d: c for d, c in self._lookups.items() if now - c.at <= RECHECK_S}
        idle = [a for a, k in self._sessions.items() if now - k.used_at > IDLE_S and k.session.in_flight == 0]
        for attempt_id in idle:
            del self._sessions[attempt_id]

    async def _restore(self, key: StoredKey) -> GatewaySession:
        """Restore a session to its state when the last of its calls was answered."""
        budget = msgspec.convert(key.budget, Budget) if key.budget else self._budget
        sequence = await asyncio.to_thread(self._store.calls.next_sequence, key.attempt_id)
        session = GatewaySession(key.attempt_id, {**self._sampling, **key.sampling}, budget, sequence=sequence)
        calls = await asyncio.to_thread(self._store.calls.of_attempt, key.attempt_id)
        while batch := await asyncio.to_thread(lambda: list(islice(calls, TOGETHER))):
            for call in batch:
                if call.sequence == 0:
                    session.spending.started_ago(time.time() - call.started_at)
                if call.error is None or call.error.type != BudgetExceeded.__name__:
                    session.spending.add(call.usage, call.cost_usd, len(call.request))
                if call.status == "ok":
                    self._restore_call(session, call)
        return session

    def _restore_call(self, session: GatewaySession, call: Call) -> None:
        """Restore an answered call: its tool calls may come back, and a backend may build on its tokens."""
        branch = Branch(call.session_id, call.agent_id)
        blocks = read_response(call) or ()
        sampled = sampled_calls(blocks)
        session.record_response(branch, call.id, sampled)
        server = self._models.server_for(call.requested_model)
        if call.completion_token_ids is None or not isinstance(server, RestorableBackend):
            return
        generation = Generation(
            model=call.backend_model,
            text="".join(block.text for block in blocks if block.kind == "text"),
            tool_calls=tuple(sampled.values()),
            finish_reason=call.finish_reason or "stop",
            prompt_token_ids=call.prompt_token_ids,
            completion_token_ids=call.completion_token_ids,
        )
        dialect = DIALECTS[call.dialect]
        request = dialect.parse(call.request, session, branch, dialect.target(call.requested_model))
        server.restore(request.chat, generation)
