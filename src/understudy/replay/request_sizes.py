"""Computes how large the requests to teachers would be, without building each one.

Consecutive requests of a conversation mostly share their beginning. What comes before an answer is laid out once,
and a request's size is the sum of its parts' sizes. So the estimate for a conversation of n turns takes O(n),
while its requests together have O(n²) bytes.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from understudy.ingest.trace import Message
from understudy.replay.requests import RequestSize, build_request, empty_size, rest_size
from understudy.replay.teachers import Teacher


class _SizedPart(Struct, frozen=True):
    """The first `number` messages of a conversation: their total size, and the ids that are new at their end."""

    number: int
    size: RequestSize
    new_ids: frozenset[str]


class RequestSizer:
    """Computes the sizes of the requests that `build_request` would build. It caches the last conversation."""

    def __init__(self) -> None:
        self._conversations: dict[bool, _ConversationSizer] = {}
        self._empty: dict[str, tuple[list[dict[str, Any]] | None, RequestSize]] = {}

    def size(self, teacher: Teacher, messages: list[Message], tools: list[dict[str, Any]] | None) -> RequestSize:
        """Return the size of the request that asks a teacher for the next turn of a conversation with
        these tools.
        """
        anthropic = teacher.config.backend == "anthropic"
        conversation = self._conversations.get(anthropic)
        if conversation is None:
            conversation = self._conversations[anthropic] = _ConversationSizer(teacher)
        try:
            cached = self._empty.get(teacher.name)
            if cached is None or cached[0] != tools:
                self._empty[teacher.name] = cached = (tools, empty_size(teacher.config, tools))
            size = conversation.size(messages)
        except (UnicodeEncodeError, msgspec.ValidationError):
            return build_request(teacher.config, messages, tools).size
        return build_request(teacher.config, messages, tools).size if size is None else cached[1].plus(size)


class _ConversationSizer:
    """Computes the sizes of conversations' messages, in the format of a teacher's API."""

    def __init__(self, teacher: Teacher) -> None:
        self._config = teacher.config
        self._messages: list[Message] = []
        self._parts: list[_SizedPart] = []
        self._ids: set[str] = set()

    def size(self, messages: list[Message]) -> RequestSize | None:
        """Return the size of the messages; None if they cannot be laid out in parts.

        Raises UnicodeEncodeError or msgspec.ValidationError if `build_request` would have to repair the messages.
        """
        self._forget(messages)
        self._messages = messages
        before = self._parts[-1] if self._parts else None
        rest = messages if before is None else messages[before.number :]
        if before is not None and not rest:
            return before.size
        ids = self._ids.copy()
        size = rest_size(self._config, rest, ids, begins=before is None)
        if size is None:
            return None
        total = size if before is None else before.size.plus(size, comma=True)
        if rest and rest[-1]["role"] in ("user", "tool"):
            self._parts.append(_SizedPart(len(messages), total, frozenset(ids - self._ids)))
            self._ids = ids
        return total

    def _forget(self, messages: list[Message]) -> None:
        """Drop cached parts that are not a prefix of these messages, or that are not followed by an
        answer here.
        """
        last_number = self._parts[-1].number if self._parts else 0
        if messages[:last_number] != self._messages[:last_number]:
            pairs = enumerate(zip(messages, self._messages[:last_number], strict=False))
            last_number = next((at for at, (one, other) in pairs if one != other), min(len(messages), last_number))
        while self._parts:
            number = self._parts[-1].number
            if number <= last_number and (number == len(messages) or _is_spoken(messages[number])):
                return
            self._ids -= self._parts.pop().new_ids


def _is_spoken(message: Message) -> bool:
    """Return whether a message is an answer with content that every API shows to its model."""
    content = message.get("content")
    return message["role"] == "assistant" and (
        any(call.get("type") == "function" for call in message.get("tool_calls") or ())
        or (isinstance(content, str) and bool(content.strip()))
    )
