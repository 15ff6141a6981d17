"""Decides where the CLI sends content that accompanies messages: reminders, mentioned files, queued prompts.

The CLI joins all user messages since a response into one, with tool results first. Accompanying content follows
the last tool result, in log order, and is merged into that result if nothing but results came before. Newer
versions instead send newer models a system message after all of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from understudy.ingest.claude_code import tree
from understudy.ingest.claude_code.attachments import SentAttachment
from understudy.ingest.claude_code.records import ClaudeMessage, ClaudeRecord
from understudy.ingest.claude_code.versions import VersionBehaviour
from understudy.ingest.trace import TraceNode

_AFTER_TOOL = "<system-reminder>\nPostToolUse"


def add_parts(
    nodes: list[TraceNode],
    damage: dict[int, tuple[str, ...]],
    at: int,
    sent: SentAttachment,
    behaviour: VersionBehaviour,
) -> int:
    """Add accompanying content at or before node `at`, and return the last node.

    It is merged into the last tool result (or the one that `tool_use_id` names). If text was sent since the
    response, if the content must stay separate, or if the model gets system messages, it becomes a text after the
    results. Without a result, it is put before the user's text. Existing nodes are never changed but copied as
    siblings, since earlier turns may have been sent the originals. `damage` holds the notes of nodes; a copy
    inherits them.
    """
    system = behaviour.has_system_messages
    if system and not sent.amid_users and (texts := sent.bare_texts()):
        return add_bodies(nodes, [_system_message(texts)], at)
    passed, step = _nodes_to_result(nodes, at, sent)
    into = tree.sent_record(nodes[step].body) if step >= 0 else None
    if into is not None and into.record.type == "attachment":
        into = None
    if into is not None and (system or sent.is_apart or _has_text_before(nodes, step)):
        into = None
    elif into is None and passed:
        step = passed.pop()
        into = tree.sent_record(nodes[step].body)
    bodies: list[object] = [nodes[node].body for node in reversed(passed)]
    if into is not None:
        damage[len(nodes)] = damage.get(step, ())
        bodies.insert(0, into.with_added(sent.parts, extends_lists=behaviour.extends_lists))
        step = nodes[step].parent
    else:
        content = list(sent.parts)
        bodies.insert(0, ClaudeRecord(type="attachment", message=ClaudeMessage(content=content)))
    return add_bodies(nodes, bodies, step)


def add_bodies(nodes: list[TraceNode], bodies: Sequence[object], at: int) -> int:
    """Add a chain of nodes with these bodies after `at`. Returns the last node."""
    for body in bodies:
        nodes.append(TraceNode(at, body))
        at = len(nodes) - 1
    return at


def system_messages_before(nodes: Sequence[TraceNode], at: int) -> tuple[list[object], int]:
    """Return the bodies of the consecutive system messages that end at `at`, and the node before them."""
    bodies: list[object] = []
    while at >= 0 and type(nodes[at].body) is ClaudeRecord and _is_system_message(nodes[at].body):
        bodies.insert(0, nodes[at].body)
        at = nodes[at].parent
    return bodies, at


def _system_message(texts: Sequence[str]) -> ClaudeRecord:
    """Build the body of a system message within the conversation. In states its text becomes the user's."""
    return ClaudeRecord(type="attachment", message=ClaudeMessage(content="\n".join(texts)))


def added_after_tools(nodes: Sequence[TraceNode], at: int) -> tuple[list[object], int]:
    """Return the bodies of the hook output that ends at `at`, after tool results, and the node before it."""
    bodies: list[object] = []
    while is_added(nodes, at) and str(_first_part(nodes[at].body)).startswith(_AFTER_TOOL):
        bodies.insert(0, nodes[at].body)
        at = nodes[at].parent
    return bodies, at


def _first_part(body: object) -> object:
    content = body.message.content if isinstance(body, ClaudeRecord) and body.message is not None else None
    return content[0] if isinstance(content, list) and content else None


def _is_system_message(body: object) -> bool:
    """Return whether a body was made by `_system_message`."""
    if not isinstance(body, ClaudeRecord) or body.type != "attachment" or body.message is None:
        return False
    return isinstance(body.message.content, str)


def _nodes_to_result(nodes: Sequence[TraceNode], at: int, added: SentAttachment) -> tuple[list[int], int]:
    """Walk back over the user's side from `at` to a tool result. Returns the nodes passed, and the node where it
    stopped.

    The target is the last result, or the one of `added.tool_use_id` if the same response has it. Without a result,
    the walk stops at the response, at earlier accompanying content, or, for content that is sent separately, at a
    summary.
    """
    passed: list[int] = []
    last_result: tuple[list[int], int] | None = None
    while at >= 0 and (sent := tree.sent_record(nodes[at].body)) is not None:
        if sent.record.type == "attachment" and not _is_system_message(sent.record):
            break
        if added.is_apart and sent.record.isCompactSummary:
            return passed, at
        if ids := tree.result_ids(sent.record):
            if added.tool_use_id is None or added.tool_use_id in ids:
                return passed, at
            last_result = last_result or (list(passed), at)
        passed.append(at)
        at = nodes[at].parent
    return last_result or (passed, at)


def _has_text_before(nodes: Sequence[TraceNode], at: int) -> bool:
    """Return whether a text was sent between the response and the tool results that end at `at`."""
    at = nodes[at].parent
    while at >= 0 and (sent := tree.sent_record(nodes[at].body)) is not None:
        if not tree.result_ids(sent.record):
            return True
        at = nodes[at].parent
    return False


def is_added(nodes: Sequence[TraceNode], at: int) -> bool:
    """Return whether a node is accompanying content (not a system message) that follows other content of the
    user's side.
    """
    body = nodes[at].body if at >= 0 else None
    if not isinstance(body, ClaudeRecord) or body.type != "attachment" or _is_system_message(body):
        return False
    above = tree.sent_record(nodes[nodes[at].parent].body) if nodes[at].parent >= 0 else None
    return above is not None
