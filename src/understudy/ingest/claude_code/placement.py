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
    tip: int,
    sent: SentAttachment,
    behaviour: VersionBehaviour,
) -> int:
    """Add accompanying content at or before node `tip`, and return the last node.

    It is merged into the last tool result (or the one that `tool_use_id` names). If text was sent since the
    response, if the content must stay separate, or if the model gets system messages, it becomes a text after the
    results. Without a result, it is put before the user's text. Existing nodes are never changed but copied as
    siblings, since earlier turns may have been sent the originals. `damage` holds the notes of nodes; a copy
    inherits them.
    """
    as_system = behaviour.has_system_messages
    if as_system and not sent.amid_users and (texts := sent.bare_texts()):
        return add_bodies(nodes, [_system_message(texts)], tip)
    passed_nodes, stop = _nodes_to_result(nodes, tip, sent)
    target = tree.sent_record(nodes[stop].body) if stop >= 0 else None
    if target is not None and target.record.type == "attachment":
        target = None
    if target is not None and (as_system or sent.is_apart or _has_text_before(nodes, stop)):
        target = None
    elif target is None and passed_nodes:
        stop = passed_nodes.pop()
        target = tree.sent_record(nodes[stop].body)
    bodies: list[object] = [nodes[node].body for node in reversed(passed_nodes)]
    if target is not None:
        damage[len(nodes)] = damage.get(stop, ())
        bodies.insert(0, target.with_added(sent.parts, extends_lists=behaviour.extends_lists))
        stop = nodes[stop].parent
    else:
        content = list(sent.parts)
        bodies.insert(0, ClaudeRecord(type="attachment", message=ClaudeMessage(content=content)))
    return add_bodies(nodes, bodies, stop)


def add_bodies(nodes: list[TraceNode], bodies: Sequence[object], tip: int) -> int:
    """Add a chain of nodes with these bodies after `tip`. Returns the last node."""
    for body in bodies:
        nodes.append(TraceNode(tip, body))
        tip = len(nodes) - 1
    return tip


def system_messages_before(nodes: Sequence[TraceNode], tip: int) -> tuple[list[object], int]:
    """Return the bodies of the consecutive system messages that end at `tip`, and the node before them."""
    bodies: list[object] = []
    while tip >= 0 and type(nodes[tip].body) is ClaudeRecord and _is_system_message(nodes[tip].body):
        bodies.insert(0, nodes[tip].body)
        tip = nodes[tip].parent
    return bodies, tip


def _system_message(texts: Sequence[str]) -> ClaudeRecord:
    """Build the body of a system message within the conversation. In states its text becomes the user's."""
    return ClaudeRecord(type="attachment", message=ClaudeMessage(content="\n".join(texts)))


def added_after_tools(nodes: Sequence[TraceNode], tip: int) -> tuple[list[object], int]:
    """Return the bodies of the hook output that ends at `tip`, after tool results, and the node before it."""
    bodies: list[object] = []
    while is_added(nodes, tip) and str(_first_part(nodes[tip].body)).startswith(_AFTER_TOOL):
        bodies.insert(0, nodes[tip].body)
        tip = nodes[tip].parent
    return bodies, tip


def _first_part(body: object) -> object:
    content = body.message.content if isinstance(body, ClaudeRecord) and body.message is not None else None
    return content[0] if isinstance(content, list) and content else None


def _is_system_message(body: object) -> bool:
    """Return whether a body was made by `_system_message`."""
    if not isinstance(body, ClaudeRecord) or body.type != "attachment" or body.message is None:
        return False
    return isinstance(body.message.content, str)


def _nodes_to_result(nodes: Sequence[TraceNode], tip: int, added: SentAttachment) -> tuple[list[int], int]:
    """Walk back over the user's side from `tip` to a tool result. Returns the nodes passed, and the node where it
    stopped.

    The target is the last result, or the one of `added.tool_use_id` if the same response has it. Without a result,
    the walk stops at the response, at earlier accompanying content, or, for content that is sent separately, at a
    summary.
    """
    passed_nodes: list[int] = []
    last_result: tuple[list[int], int] | None = None
    while tip >= 0 and (sent := tree.sent_record(nodes[tip].body)) is not None:
        if sent.record.type == "attachment" and not _is_system_message(sent.record):
            break
        if added.is_apart and sent.record.isCompactSummary:
            return passed_nodes, tip
        if ids := tree.result_ids(sent.record):
            if added.tool_use_id is None or added.tool_use_id in ids:
                return passed_nodes, tip
            last_result = last_result or (list(passed_nodes), tip)
        passed_nodes.append(tip)
        tip = nodes[tip].parent
    return last_result or (passed_nodes, tip)


def _has_text_before(nodes: Sequence[TraceNode], tip: int) -> bool:
    """Return whether a text was sent between the response and the tool results that end at `tip`."""
    tip = nodes[tip].parent
    while tip >= 0 and (sent := tree.sent_record(nodes[tip].body)) is not None:
        if not tree.result_ids(sent.record):
            return True
        tip = nodes[tip].parent
    return False


def is_added(nodes: Sequence[TraceNode], node: int) -> bool:
    """Return whether a node is accompanying content (not a system message) that follows other content of the
    user's side.
    """
    body = nodes[node].body if node >= 0 else None
    if not isinstance(body, ClaudeRecord) or body.type != "attachment" or _is_system_message(body):
        return False
    preceding = tree.sent_record(nodes[nodes[node].parent].body) if nodes[node].parent >= 0 else None
    return preceding is not None
