"""API keys: a key identifies one attempt and works until it is revoked. Only its hash is stored."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

from understudy.errors import GatewayError
from understudy.gateway.budget import Budget, CostCeiling
from understudy.gateway.session import GatewaySession

PREFIX = "sk-understudy-"
_NO_SAMPLING: Mapping[str, Any] = MappingProxyType({})


class KeyRing(Protocol):
    """Where the gateway looks up API keys."""

    async def find_session(self, key: str) -> GatewaySession | None:
        """Return the session of a key, or None if the key is invalid, revoked or expired."""
        ...


class Keys:
    """The keys of the attempts that run in this process (see KeyRing). `ceiling` limits their total cost."""

    def __init__(self, ceiling: CostCeiling | None = None) -> None:
        self._ceiling = ceiling
        self._entries: dict[bytes, tuple[bytes, GatewaySession]] = {}
        self._indices: dict[str, bytes] = {}

    def issue(
        self, attempt_id: str, *, sampling: Mapping[str, Any] = _NO_SAMPLING, budget: Budget | None = None
    ) -> str:
        """Make a new key for an attempt. `sampling` overrides what the agent requests in each of its calls.

        Raises GatewayError if the attempt has a key already.
        """
        if attempt_id in self._indices:
            raise GatewayError(
                f"attempt {attempt_id} already has an API key; expected one key per attempt: revoke it "
                "before issuing another"
            )
        key = new_key()
        digest = digest_of(key)
        self._entries[digest[:8]] = (digest, GatewaySession(attempt_id, sampling, budget, ceiling=self._ceiling))
        self._indices[attempt_id] = digest[:8]
        return key

    def revoke(self, attempt_id: str) -> GatewaySession | None:
        """Revoke an attempt's key at once. Returns its session, or None if it has no key."""
        index = self._indices.pop(attempt_id, None)
        return None if index is None else self._entries.pop(index)[1]

    async def find_session(self, key: str) -> GatewaySession | None:
        """Return the session of a key, or None.

        The key is looked up by a few bytes of its hash and then compared in constant time, so that the time taken
        reveals nothing about existing keys.
        """
        digest = digest_of(key)
        expected, session = self._entries.get(digest[:8], (b"", None))
        return session if hmac.compare_digest(expected, digest) else None


def new_key() -> str:
    """Return a new random key that nobody can guess."""
    return PREFIX + secrets.token_urlsafe(32)


def digest_of(key: str) -> bytes:
    """Return the hash of a key, which is all that is stored of it. Any text has one."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
