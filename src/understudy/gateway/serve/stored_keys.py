"""Keys that outlive a process: their hashes are in the store, and so is all that their sessions are made of."""

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
from understudy.gateway.backends.base import Remembering
from understudy.gateway.budget import Budget
from understudy.gateway.keys import digest_of, new_key
from understudy.gateway.router import ModelRouter
from understudy.gateway.session import GatewaySession
from understudy.store.keys import StoredKey
from understudy.store.store import Store
from understudy.types import Call
from understudy.wire.dialect import Branch
from understudy.wire.dialects import DIALECTS
from understudy.wire.model import Generation
from understudy.wire.stored import read_response, sampled_calls

RECHECK_S = 1.0
"""How long a key goes on working after another process revoked it, in seconds."""
IDLE_S = 3600.0
"""After so long without a request a session is dropped; it is made again from the store when it is needed."""
TOGETHER = 64
"""How many calls are in memory at once while a session is made again: a client may have made any number."""
SWEEP_S = 60.0
"""How often what is no longer needed is looked for, in seconds: to look goes over all keys."""


_log = logging.getLogger(__name__)


async def issue(
    store: Store, name: str, *, expires_at: float | None = None, budget: Mapping[str, Any] | None = None
) -> str:
    """A new key for the client `name`, whose older key stops working. It is told here and never again.

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
    """What the store said of a key, and when; None: it opens nothing."""

    key: StoredKey | None
    at: float = field(default_factory=time.monotonic)


@dataclass
class _OpenSession:
    """A session, and the key that it was last opened with."""

    session: GatewaySession
    digest: bytes
    used_at: float = field(default_factory=time.monotonic)


class StoredKeys:
    """The keys of a store (see KeyRing). Sessions are made from the calls that are there already.

    `sampling` is laid over what agents ask, a key's own over that; `budget` bounds attempts whose key has none.
    """

    def __init__(
        self, store: Store, models: ModelRouter, sampling: Mapping[str, Any], budget: Budget | None
    ) -> None:
        self._store = store
        self._models = models
        self._sampling = sampling
        self._budget = budget
        self._checked: dict[bytes, _KeyLookup] = {}
        self._kept: dict[str, _OpenSession] = {}
        self._swept_at = time.monotonic()
        # By attempt, and only while somebody waits: one that has a long past holds up no other.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def attempt(self, key: str) -> str | None:
        """The attempt that a key names, or None when it is wrong, revoked or expired. Raises GatewayError."""
        found = await self._check(digest_of(key))
        return None if found is None else found.attempt_id

    async def find_session(self, key: str) -> GatewaySession | None:
        """See KeyRing. Raises GatewayError, or StoreError when the calls of an attempt cannot be read."""
        found = await self._check(digest_of(key))
        if found is None:
            return None
        kept = self._kept.get(found.attempt_id)
        if kept is None or (kept.digest != found.digest and kept.session.in_flight == 0):
            lock = self._locks.setdefault(found.attempt_id, asyncio.Lock())
            async with lock:
                kept = self._kept.get(found.attempt_id)
                if kept is None or (kept.digest != found.digest and kept.session.in_flight == 0):
                    kept = self._kept[found.attempt_id] = _OpenSession(await self._restore(found), found.digest)
        kept.used_at = time.monotonic()
        return kept.session

    async def _check(self, digest: bytes) -> StoredKey | None:
        checked = self._checked.get(digest)
        if checked is None or time.monotonic() - checked.at > RECHECK_S:
            self._forget()
            try:
                # On the event loop: one row by its key waits for nobody, and a thread costs five times as much.
                checked = _KeyLookup(self._store.keys.find(digest))
            except StoreError as error:
                # Nothing was asked of a model yet, so that another try does no harm.
                _log.error("a key cannot be looked up: %s", error)
                raise GatewayError("the gateway cannot look its keys up; try again") from error
            if checked.key is not None:  # what anybody may invent is not remembered
                self._checked[digest] = checked
        key = checked.key
        if key is None or key.revoked_at is not None:
            return None
        return None if key.expires_at is not None and key.expires_at <= time.time() else key

    def _forget(self) -> None:
        now = time.monotonic()
        if now - self._swept_at < SWEEP_S:
            return
        self._swept_at = now
        self._checked = {d: c for d, c in self._checked.items() if now - c.at <= RECHECK_S}
        idle = [a for a, k in self._kept.items() if now - k.used_at > IDLE_S and k.session.in_flight == 0]
        for attempt_id in idle:
            del self._kept[attempt_id]

    async def _restore(self, key: StoredKey) -> GatewaySession:
        """A session as it was when the last of its calls was answered."""
        budget = msgspec.convert(key.budget, Budget) if key.budget else self._budget
        sequence = await asyncio.to_thread(self._store.calls.next_sequence, key.attempt_id)
        session = GatewaySession(key.attempt_id, {**self._sampling, **key.sampling}, budget, sequence=sequence)
        calls = await asyncio.to_thread(self._store.calls.of_attempt, key.attempt_id)
        while some := await asyncio.to_thread(lambda: list(islice(calls, TOGETHER))):
            for call in some:
                if call.sequence == 0:
                    session.spending.started_ago(time.time() - call.started_at)
                session.spending.add(call.usage, call.cost_usd)
                if call.status == "ok":
                    self._recall(session, call)
        return session

    def _recall(self, session: GatewaySession, call: Call) -> None:
        """Take up an answered call: its tool calls may come back, and a backend may build on its tokens."""
        branch = Branch(call.session_id, call.agent_id)
        blocks = read_response(call) or ()
        sampled = sampled_calls(blocks)
        session.record_response(branch, call.id, sampled)
        answerer = self._models.server_for(call.requested_model)
        if call.completion_token_ids is None or not isinstance(answerer, Remembering):
            return
        text = "".join(block.text for block in blocks if block.kind == "text")
        generation = Generation(
            model=call.backend_model,
            text=text,
            tool_calls=tuple(sampled.values()),
            finish_reason=call.finish_reason or "stop",
            prompt_token_ids=call.prompt_token_ids,
            completion_token_ids=call.completion_token_ids,
        )
        answerer.restore(DIALECTS[call.dialect].parse(call.request, session, branch).chat, generation)
