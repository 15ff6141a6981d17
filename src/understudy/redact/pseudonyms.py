"""Pseudonyms: the same for the same secret everywhere, and telling nothing of it to who has not the key."""

from __future__ import annotations

import hmac
from typing import Literal

from understudy.redact.forms import pseudonym_label

SecretKind = Literal["secret", "private-key", "user", "email"]


class Pseudonyms:
    """Makes pseudonyms under a key."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._cached: dict[tuple[SecretKind, str], str] = {}

    def name(self, kind: SecretKind, value: str) -> str:
        """The pseudonym of a value: `[GITHUB_TOKEN_3f2a91]`, `user_1c2d3e`, `user_1c2d3e@example.com`."""
        pseudonym = self._cached.get((kind, value))
        if pseudonym is None:
            pseudonym = self._make(kind, value)
            if len(self._cached) < 100_000:
                self._cached[kind, value] = pseudonym
        return pseudonym

    def _make(self, kind: SecretKind, value: str) -> str:
        if kind == "email":
            value = value.lower()
        sort = "secret" if kind == "private-key" else kind
        message = f"understudy redaction 1\0{sort}\0{value}".encode(errors="surrogatepass")
        digits = hmac.digest(self._key, message, "sha256").hex()[:6]
        if kind == "user":
            return f"user_{digits}"
        if kind == "email":
            return f"user_{digits}@example.com"
        return f"[{'PRIVATE_KEY' if kind == 'private-key' else pseudonym_label(value)}_{digits}]"
