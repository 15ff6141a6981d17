"""Assigns each call its role: the work itself, a subagent's, a summary of a conversation, or auxiliary.

A role is decided by the wording of the request and by what followed the answer, never by position alone. What an
agent states about itself is trusted: the role only decides what is learned, so a wrong statement harms nothing but
its own data.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, get_args

from understudy.trajectory.request_wordings import Position, wording_pattern

if TYPE_CHECKING:
    from understudy.trajectory.tree import Node

Role = Literal["main", "subagent", "compaction", "auxiliary"]
"""What a call is for.

main: the session itself. subagent: an agent that another one started. compaction: the request for a summary, from
which the session then continues; the calls after it are main, or subagent, again. auxiliary: titles, help with a
tool, suggestions and the like, from which the conversation does not continue.
"""

ROLES: tuple[Role, ...] = get_args(Role)

_COMPACTION: dict[Position, re.Pattern[str]] = {
    position: wording_pattern("compaction", position) for position in get_args(Position)
}
_AUXILIARY: dict[Position, re.Pattern[str]] = {
    position: wording_pattern("auxiliary", position) for position in get_args(Position)
}
CONTINUED = wording_pattern("continued", "question")
"""The text that agents put before the summary when they continue from it."""

_SUMMARY_ANSWER = re.compile(r"\s*(?:<analysis>.*</analysis>)?\s*<summary>.*</summary>\s*", re.DOTALL)
"""An answer to Claude Code's request for a summary, which keeps only the text in the second tag."""

QUOTED = 8
"""The minimum length, in characters, of a quoted text that shows that two chats without sessions belong together.
"""

_MAX_QUOTABLE_TEXTS = 200
_SYSTEM_PROMPT_CHARS = 1000


def assign(nodes: Sequence[Node]) -> None:
    """Set the role of every node. `nodes` are in the order of their calls, with their parents set."""
    with_tools = {node.call.session_id for node in nodes if node.conversation.has_tools}
    questions = _questions(nodes)
    inputs: deque[str] = deque(maxlen=_MAX_QUOTABLE_TEXTS)
    for node in nodes:
        if node.call.session_id is None:
            inputs += (value for value in _inputs(node) if len(value) >= QUOTED)
        if _asks_for_summary(node):
            node.role = "compaction"
        elif _is_auxiliary(node, with_tools, (*questions, *inputs)):
            node.role = "auxiliary"
        elif node.parent is not None:
            node.role = node.parent.role
        elif node.call.agent_id is not None or node.spawned_by is not None:
            node.role = "subagent"
        else:
            node.role = "main"


def continues_parent(node: Node) -> bool:
    """Return whether a node continues its parent's line; one that was forked off for a role of its own
    does not.
    """
    return node.parent is None or node.role == node.parent.role


def _asks_for_summary(node: Node) -> bool:
    """Return whether a node's last message asks for a summary of the conversation before it.

    Either the request's words show it, or its answer, or that its last `cache_control` mark stands before the
    request (`Conversation.cache_ends_early`).
    """
    prompt = _last_user_text(node)
    if _has_wording(node, _COMPACTION):
        return True
    if not prompt or not _has_history(node) or _has_wording(node, _AUXILIARY):
        return False
    return node.conversation.cache_ends_early or (not node.children and _is_summary(node))


def _questions(nodes: Sequence[Node]) -> tuple[str, ...]:
    """Return the first user texts of the conversations that have tools and no session."""
    texts = (
        block.text
        for node in nodes
        if node.call.session_id is None and node.parent is None and node.conversation.has_tools
        for block in node.conversation.blocks
        if block.role == "user" and block.kind == "text" and len(block.text) >= QUOTED
    )
    return tuple(dict.fromkeys(texts))[:_MAX_QUOTABLE_TEXTS]


def _inputs(node: Node) -> Iterator[str]:
    for block in node.answer or ():
        if block.kind == "tool_use":
            yield from (value for value in block.inputs().values() if isinstance(value, str))


def _is_auxiliary(node: Node, with_tools: Collection[str | None], quotable: Collection[str]) -> bool:
    """Return whether a call is beside the work: a single question with at most one tool, or one that forks off a
    conversation.

    Without tools, it is beside a conversation of its session that has some. Without sessions, unrelated chats may
    share a key, so the question must quote something that is `quotable`.
    """
    conversation = node.conversation
    if _has_wording(node, _AUXILIARY):
        return True
    if _has_history(node):
        return _asks_for_a_form(node)
    if node.children or not conversation.blocks:
        return False
    if conversation.has_tools:
        return conversation.tool_is_forced
    if conversation.has_output_schema or node.call.session_id is not None:
        return conversation.has_output_schema or node.call.session_id in with_tools
    question = "\n".join(block.text for block in conversation.blocks)
    return any(text in question for text in quotable)


def _has_wording(node: Node, patterns: Mapping[Position, re.Pattern[str]]) -> bool:
    """Return whether a request has the wording that agents use for a kind of request."""
    if patterns["instructions"].match(node.conversation.system[:_SYSTEM_PROMPT_CHARS]):
        return True
    texts = _last_user_text(node)
    if any(patterns["question"].match(text) for text in texts):
        return True
    return _has_history(node) and any(patterns["fork"].match(text) for text in texts)


def _asks_for_a_form(node: Node) -> bool:
    """Return whether a conversation with tools gets a request without tools for a response in a given format, as
    for a check.
    """
    parent = node.parent
    return (
        parent is not None
        and parent.conversation.has_tools
        and node.conversation.has_output_schema
        and not node.conversation.has_tools
    )


def _has_history(node: Node) -> bool:
    return any(block.role == "assistant" for block in node.conversation.blocks)


def _last_user_text(node: Node) -> list[str]:
    """Return the user's texts after the assistant's last turn, without tool results."""
    texts: list[str] = []
    for block in reversed(node.conversation.blocks):
        if block.role == "assistant":
            break
        if block.role == "user" and block.kind == "text":
            texts.append(block.text)
    return texts


def _is_summary(node: Node) -> bool:
    answer = node.answer or ()
    answer_text = "".join(block.text for block in answer if block.kind == "text")
    return (
        not any(block.kind == "tool_use" for block in answer)
        and _SUMMARY_ANSWER.fullmatch(answer_text) is not None
    )
