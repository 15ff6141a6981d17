"""The gateway's memory of one attempt: its budget, its branches, and the tool calls in its answers."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Any

from understudy.errors import StoreError
from understudy.gateway.budget import Budget, CostCeiling, Spending
from understudy.gateway.errors import RETRY_AFTER_LIMIT_S
from understudy.wire.dialect import Branch
from understudy.wire.model import ConversationHandle, ToolCall

_TOOL_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
BRANCHES_LIMIT = 1000
"""How many branches of an attempt backends may remember."""


class GatewaySession:
    """The gateway's state of one attempt (or of a client of a gateway that runs alone) while its key is valid."""

    def __init__(
        self,
        attempt_id: str,
        sampling: Mapping[str, Any],
        budget: Budget | None = None,
        *,
        sequence: int = 0,
        ceiling: CostCeiling | None = None,
    ) -> None:
        self.attempt_id = attempt_id
        self.sampling = dict(sampling)
        self.spending = Spending(budget)
        self.ceiling = ceiling
        """What bounds the cost of all attempts of its run together, if anything does."""
        self.budget_message: str | None = None
        """The final message that the agent got when its budget was used up; None before that."""
        self.store_error: StoreError | None = None
        """Why the latest call could not be stored; None if it was stored."""
        self.calls_started = 0
        """How many calls of the model were started."""
        self.in_flight = 0
        """How many of them have not ended."""
        self.body_bytes = 0
        """The size of the bodies of its unanswered requests, in bytes."""
        self.retry_after_limit_s = RETRY_AFTER_LIMIT_S
        """The longest retry-after, in seconds, that this client gets."""
        self._calls = sequence
        self._last: dict[Branch, str] = {}
        self._tool_ids: set[str] = set()
        self._sampled: dict[str, ToolCall] = {}
        self._conversations: dict[Branch, ConversationHandle] = {}

    def conversation(self, branch: Branch) -> ConversationHandle:
        """Return the object that identifies a branch to backends, the same for all calls of the branch."""
        key = f"{self.attempt_id} {branch.session_id or ''}"
        handle = self._conversations.pop(branch, None) or ConversationHandle(key)
        self._conversations[branch] = handle  # moved to the end, as the most recently used
        if len(self._conversations) > BRANCHES_LIMIT:
            del self._conversations[next(iter(self._conversations))]
        return handle

    def next_sequence(self) -> int:
        """Return the number of the attempt's next call, counted from 0."""
        self._calls += 1
        return self._calls - 1

    @property
    def unanswered(self) -> bool:
        """Whether the agent called the model and never got a response."""
        return self.calls_started > 0 and not self._last

    def last_call_id(self, branch: Branch) -> str | None:
        """Return the id of the last answered call on a branch, or None."""
        return self._last.get(branch)

    def record_response(self, branch: Branch, call_id: str, sampled: Mapping[str, ToolCall]) -> None:
        """Record a committed response: the branch's next call follows it, and its tool calls may come back."""
        self._last[branch] = call_id
        self._tool_ids.update(sampled)
        self._sampled.update(sampled)

    def tool_id(self, offered: str) -> str:
        """Return a tool id that no earlier answer of the attempt used: the offered one if possible, else a new
        one.

        Claude Code deletes a turn whose tool id it has seen before.
        """
        usable = _TOOL_ID.fullmatch(offered) and offered not in self._tool_ids
        chosen = offered if usable else f"toolu_{secrets.token_hex(12)}"
        self._tool_ids.add(chosen)
        return chosen

    def sampled(self, tool_id: str) -> ToolCall | None:
        """Return the tool call as the model wrote it, by the id that the agent was given."""
        return self._sampled.get(tool_id)
