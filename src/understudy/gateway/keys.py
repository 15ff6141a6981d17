"""API keys: a key names one attempt, works until it is revoked, and only its hash is stored."""

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
    """Where the gateway looks API keys up."""

    async def find_session(self, key: str) -> GatewaySession | None:
        """The session of a key, or None when the key is invalid, revoked or expired."""
        ...


class Keys:
    """The keys of the attempts that run in this process (see KeyRing); `ceiling` bounds what all cost together."""

    def __init__(self, ceiling: CostCeiling | None = None) -> None:
        self._ceiling = ceiling
        self._entries: dict[bytes, tuple[bytes, GatewaySession]] = {}
        self._indices: dict[str, bytes] = {}

    def issue(
        self, attempt_id: str, *, sampling: Mapping[str, Any] = _NO_SAMPLING, budget: Budget | None = None
    ) -> str:
        """A new key for an attempt. `sampling` is laid over what the agent asks in each of its calls.

        Raises GatewayError when the attempt has a key already.
        """
        if attempt_id in self._indices:
            raise GatewayError(f"attempt {attempt_id} already has an API key; revoke it before issuing another")
        key = new_key()
        digest = digest_of(key)
        self._entries[digest[:8]] = (digest, GatewaySession(attempt_id, sampling, budget, ceiling=self._ceiling))
        self._indices[attempt_id] = digest[:8]
        return key

    def revoke(self, attempt_id: str) -> GatewaySession | None:
        """Invalidate an attempt's key at once; returns its session, None when it has no key."""
        index = self._indices.pop(attempt_id, None)
        return None if index is None else self._entries.pop(index)[1]

    async def find_session(self, key: str) -> GatewaySession | None:
        """The session of a key, or None.

        It is looked up by a few bytes of its hash, then compared in constant time, so that the time that it takes
        reveals nothing about the keys that exist.
        """
        digest = digest_of(key)
        expected, session = self._entries.get(digest[:8], (b"", None))
        return session if hmac.compare_digest(expected, digest) else None


def new_key() -> str:
    """A key that nobody can guess."""
    return PREFIX + secrets.token_urlsafe(32)


def digest_of(key: str) -> bytes:
    """The hash of a key, which is all that is stored of it; any text has one."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
