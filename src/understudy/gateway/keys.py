"""Keys and sessions: a key names one attempt, works until it is revoked, and is kept only as its hash."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

from understudy.errors import GatewayError
from understudy.gateway.backends.base import ConversationHandle
from understudy.gateway.budget import Budget, Spending
from understudy.wire.dialect import Branch
from understudy.wire.model import ToolCall

PREFIX = "sk-understudy-"
_NO_SAMPLING: Mapping[str, Any] = MappingProxyType({})
_TOOL_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
BRANCHES_LIMIT = 1000
"""How many branches of an attempt backends may remember."""


class Session:
    """What the gateway remembers of one attempt while its key works."""

    def __init__(
        self, attempt_id: str, sampling: Mapping[str, Any], budget: Budget | None = None, *, sequence: int = 0
    ) -> None:
        self.attempt_id = attempt_id
        self.sampling = dict(sampling)
        self.spending = Spending(budget)
        self.exhausted: str | None = None
        """What the agent was told when the budget was used up."""
        self.begun = 0
        """How many exchanges with the model were begun."""
        self.in_flight = 0
        """How many of them have not ended."""
        self.held = 0
        """How many bytes the bodies of its requests hold."""
        self._calls = sequence
        self._last: dict[Branch, str] = {}
        self._tool_ids: set[str] = set()
        self._sampled: dict[str, ToolCall] = {}
        self._conversations: dict[Branch, ConversationHandle] = {}

    def conversation(self, branch: Branch) -> ConversationHandle:
        """The branch as backends know it: the same object for all calls of a branch."""
        key = f"{self.attempt_id} {branch.session_id or ''}"
        known = self._conversations.pop(branch, None) or ConversationHandle(key)
        self._conversations[branch] = known  # the last one, as it was used last
        if len(self._conversations) > BRANCHES_LIMIT:
            del self._conversations[next(iter(self._conversations))]
        return known

    def next_sequence(self) -> int:
        """The place of the next call in the attempt, from 0."""
        self._calls += 1
        return self._calls - 1

    @property
    def unanswered(self) -> bool:
        """Whether the agent asked the model, and never once got an answer."""
        return self.begun > 0 and not self._last

    def parent(self, branch: Branch) -> str | None:
        """The id of the last answered call on a branch, or None."""
        return self._last.get(branch)

    def answered(self, branch: Branch, call_id: str, sampled: Mapping[str, ToolCall]) -> None:
        """Note a committed answer: the next call on the branch follows it, its tool calls may come back."""
        self._last[branch] = call_id
        self._tool_ids.update(sampled)
        self._sampled.update(sampled)

    def tool_id(self, offered: str) -> str:
        """A tool id that no earlier answer of the attempt used: the offered one if it will do, else a new one.

        Claude Code erases a turn whose tool id it has seen before.
        """
        usable = _TOOL_ID.fullmatch(offered) and offered not in self._tool_ids
        chosen = offered if usable else f"toolu_{secrets.token_hex(12)}"
        self._tool_ids.add(chosen)
        return chosen

    def sampled(self, tool_id: str) -> ToolCall | None:
        """The tool call as the model wrote it, by the id that the agent was given."""
        return self._sampled.get(tool_id)


class KeyRing(Protocol):
    """Where the gateway finds what a key opens."""

    async def find(self, key: str) -> Session | None:
        """The session that a key opens, or None when it is wrong, revoked or expired."""
        ...


class Keys:
    """The keys of the attempts that run in this process (see KeyRing)."""

    def __init__(self) -> None:
        self._entries: dict[bytes, tuple[bytes, Session]] = {}
        self._indices: dict[str, bytes] = {}

    def issue(
        self, attempt_id: str, *, sampling: Mapping[str, Any] = _NO_SAMPLING, budget: Budget | None = None
    ) -> str:
        """A new key for an attempt. `sampling` is laid over what the agent asks in each of its calls.

        Raises GatewayError when the attempt has a key already.
        """
        if attempt_id in self._indices:
            raise GatewayError(f"attempt {attempt_id} has a key already; revoke it before issuing another")
        key = new_key()
        digest = digest_of(key)
        self._entries[digest[:8]] = (digest, Session(attempt_id, sampling, budget))
        self._indices[attempt_id] = digest[:8]
        return key

    def revoke(self, attempt_id: str) -> Session | None:
        """Make an attempt's key worthless at once, and give up its session; None when it has no key."""
        index = self._indices.pop(attempt_id, None)
        return None if index is None else self._entries.pop(index)[1]

    async def find(self, key: str) -> Session | None:
        """The session that a key opens, or None.

        Found by a few bytes of the hash, then compared whole in constant time: how long it takes says nothing
        of the keys there are.
        """
        digest = digest_of(key)
        expected, session = self._entries.get(digest[:8], (b"", None))
        return session if hmac.compare_digest(expected, digest) else None


def new_key() -> str:
    """A key that nobody can guess."""
    return PREFIX + secrets.token_urlsafe(32)


def digest_of(key: str) -> bytes:
    """What is kept of a key, whatever it holds."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
