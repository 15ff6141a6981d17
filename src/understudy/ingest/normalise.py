"""Messages in the order that chat templates require, whatever order a log has them in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MISSING_RESULT = "[Tool result missing due to internal error]"
"""Stands for a result that a log does not hold. Claude Code sends the same text when it has none."""


def normalise_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with neighbours of one role joined, and tool results before the user's text.

    Afterwards every tool call has exactly one result: a missing one is `MISSING_RESULT`, and a result without its
    call becomes text of the user's. Only empty messages and the `is_error` of results are lost. The messages
    passed in are not changed.
    """
    done: list[dict[str, Any]] = []
    users: list[dict[str, Any]] = []
    calls: list[str] = []
    for message in messages:
        role = message["role"]
        if role == "user":
            users.append(message)
        elif role == "tool":
            if message.get("tool_call_id") in calls:
                # A late result goes before what the user wrote since the response.
                calls.remove(message["tool_call_id"])
                done.append({key: value for key, value in message.items() if key != "is_error"})
            else:
                users.append({"role": "user", "content": message.get("content")})
        elif message.get("content") or message.get("tool_calls"):
            joins = role == "assistant" and not users and bool(done) and done[-1]["role"] == "assistant"
            if not joins or (calls and message.get("content")):
                # Calls may come in several messages. Text behind a call begins another response, which was sent
                # with that call's result.
                _flush(done, users, calls)
            if role == "assistant" and done and done[-1]["role"] == "assistant":
                done[-1] = _joined(done[-1], message)
            else:
                done.append(message)
            calls += [call["id"] for call in message.get("tool_calls") or ()]
    _flush(done, users, calls)
    return done


def _flush(done: list[dict[str, Any]], users: list[dict[str, Any]], calls: list[str]) -> None:
    done += [{"role": "tool", "tool_call_id": call, "content": MISSING_RESULT} for call in calls]
    calls.clear()
    spoken = [message for message in users if message.get("content")]
    users.clear()
    if not spoken:
        return
    whole = spoken[0]
    for message in spoken[1:]:
        whole = _joined(whole, message)
    done.append(whole)


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    joined = {**first, "content": _content(first.get("content"), second.get("content"))}
    calls = [*(first.get("tool_calls") or ()), *(second.get("tool_calls") or ())]
    if calls:
        joined["tool_calls"] = calls
    return joined


def _content(first: Any, second: Any) -> Any:
    if not first or not second:
        return first or second
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    return _parts(first) + _parts(second)


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
