"""Where the CLI sends what stands beside the messages: reminders, mentioned files, queued prompts.

The CLI joins all messages of the user's side since a response to one, tool results first. What it sends beside
them goes, in the order of the log, behind the last tool result, and into it where only results came before. Newer
versions send newer models a system message behind all of it instead.
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
    """Add what was sent beside the messages, behind `at`; returns the last node.

    It goes into the last tool result (that of `tool_use_id`, where it names another), unless a text was sent since
    the response, it is sent apart, or the model is sent system messages: then it is a text behind the results.
    Where there is no result, it goes in front of what the user wrote. The nodes are not changed, but get siblings:
    turns may have been sent them as they were. `damage` has the notes of nodes, which a changed copy inherits.
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
    """Add nodes with these bodies, one behind the other; returns the last one."""
    for body in bodies:
        nodes.append(TraceNode(at, body))
        at = len(nodes) - 1
    return at


def system_messages_before(nodes: Sequence[TraceNode], at: int) -> tuple[list[object], int]:
    """The bodies of the system messages that end at `at`, and the node before them."""
    bodies: list[object] = []
    while at >= 0 and _is_system_message(nodes[at].body):
        bodies.insert(0, nodes[at].body)
        at = nodes[at].parent
    return bodies, at


def _system_message(texts: Sequence[str]) -> ClaudeRecord:
    """The body of a system message amid the conversation: states have its text as the user's."""
    return ClaudeRecord(type="attachment", message=ClaudeMessage(content="\n".join(texts)))


def added_after_tools(nodes: Sequence[TraceNode], at: int) -> tuple[list[object], int]:
    """The bodies of what hooks added behind tools that end at `at`, and the node before them."""
    bodies: list[object] = []
    while is_added(nodes, at) and str(_first_part(nodes[at].body)).startswith(_AFTER_TOOL):
        bodies.insert(0, nodes[at].body)
        at = nodes[at].parent
    return bodies, at


def _first_part(body: object) -> object:
    content = body.message.content if isinstance(body, ClaudeRecord) and body.message is not None else None
    return content[0] if isinstance(content, list) and content else None


def _is_system_message(body: object) -> bool:
    """Whether a body is one of `_system_message`."""
    if not isinstance(body, ClaudeRecord) or body.type != "attachment" or body.message is None:
        return False
    return isinstance(body.message.content, str)


def _nodes_to_result(nodes: Sequence[TraceNode], at: int, added: SentAttachment) -> tuple[list[int], int]:
    """The nodes of the user's side from `at` back to a tool result, and the node before them.

    It is the last result, or that of `added.tool_use_id` where it is among the results of the same response. Where
    there is none, the nodes go back to the response, to what was sent beside the messages, or, for what is sent
    apart, to a summary.
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
    """Whether a text was sent since the response, in front of the tool results that end at `at`."""
    at = nodes[at].parent
    while at >= 0 and (sent := tree.sent_record(nodes[at].body)) is not None:
        if not tree.result_ids(sent.record):
            return True
        at = nodes[at].parent
    return False


def is_added(nodes: Sequence[TraceNode], at: int) -> bool:
    """Whether a node is what was sent beside the messages, behind tool results."""
    body = nodes[at].body if at >= 0 else None
    if not isinstance(body, ClaudeRecord) or body.type != "attachment" or _is_system_message(body):
        return False
    above = tree.sent_record(nodes[nodes[at].parent].body) if nodes[at].parent >= 0 else None
    return above is not None
