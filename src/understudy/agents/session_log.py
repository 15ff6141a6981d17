"""Compares Claude Code's session log with the stored calls: both must have the same responses.

The log was written in a sandbox under the model's control, so it is hostile input: whatever it contains leads to
findings, never to an error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, cast

import msgspec
from msgspec import Raw, Struct

from understudy.trajectory.tree import Node, Trajectory
from understudy.types import Finding
from understudy.wire.anthropic import read_response
from understudy.wire.decoding import decoded
from understudy.wire.model import Block

FINDING_KIND = "session-log"
FINDINGS_LIMIT = 20
"""The maximum number of findings of one attempt, because a hostile log could cause any number."""

_EXCERPT_LENGTH = 120
_SYNTHETIC_MODEL = "<synthetic>"  # what the CLI writes itself in the assistant's name
_UNLOGGED_ROLES = ("compaction", "auxiliary")


class _LoggedMessage(Struct):
    content: Raw
    id: str = ""
    model: str = ""


class _ResponseId(Struct):
    id: str


class _LogLine(Struct):
    type: str = ""
    uuid: str = ""
    message: Raw = Raw(b"")
    isApiErrorMessage: bool = False


_decode_line = msgspec.json.Decoder(_LogLine).decode
_decode_message = msgspec.json.Decoder(_LoggedMessage).decode
_decode_id = msgspec.json.Decoder(_ResponseId).decode


def compare_session_log(logs: Mapping[str, bytes], trajectory: Trajectory, *, cut_off: bool) -> list[Finding]:
    """Return the differences between the session's JSONL files among `logs` and the calls; empty if there are
    none.

    Every message of the log must be the answer of a call, with the same text, tool calls and inputs, except for
    what the CLI rewrites. Every answer must be in the log, unless the CLI has a reason to leave it out: it retried
    the call, it requested a summary or a title, or the answer is empty. `cut_off`: the agent was stopped or
    crashed, so the last answer of a branch may be missing too.
    """
    findings = list(_findings(logs, trajectory, cut_off))
    if len(findings) > FINDINGS_LIMIT:
        more = Finding(kind=FINDING_KIND, message=f"and {len(findings) - FINDINGS_LIMIT + 1} more differences")
        findings = [*findings[: FINDINGS_LIMIT - 1], more]
    return findings


def _findings(logs: Mapping[str, bytes], trajectory: Trajectory, cut_off: bool) -> Iterator[Finding]:
    files = {name: content for name, content in logs.items() if name.startswith("session/")}
    sessions = {name: content for name, content in files.items() if name.endswith(".jsonl")}
    answered_nodes = [node for node in trajectory.nodes if node.answer is not None and node.call.status == "ok"]
    if not sessions:
        if answered_nodes:
            yield Finding(
                kind=FINDING_KIND, message=f"the agent left no session log of {len(answered_nodes)} answered calls"
            )
        return
    logged: dict[str, list[Block]] = {}
    for name, content in sorted(sessions.items()):
        messages, unreadable = _read(content, cut_off)
        if unreadable:
            yield Finding(
                kind=FINDING_KIND, message=f"{name[:_EXCERPT_LENGTH]}: {unreadable} lines cannot be read"
            )
        for key, blocks in messages.items():
            if len(blocks) > len(logged.get(key, ())):
                logged[key] = blocks
    answers: dict[str, list[Node]] = defaultdict(list)
    for node in trajectory.nodes:
        answers[_message_id(node)].append(node)
    for key, blocks in logged.items():
        if key not in answers:
            yield Finding(
                kind=FINDING_KIND,
                message=f"the log has a response that no call has: message {key[:_EXCERPT_LENGTH]}",
            )
            continue
        differences = {node.call.id: _difference(_response_blocks(node), blocks) for node in answers[key]}
        if all(differences.values()):
            call_id, difference = list(differences.items())[-1]
            yield Finding(kind=FINDING_KIND, message=str(difference), call_id=call_id)
    for node in answered_nodes:
        if _message_id(node) not in logged and not _may_be_missing(node, cut_off):
            message = f"the answer of call {node.call.sequence} is not in the log"
            yield Finding(kind=FINDING_KIND, message=message, call_id=node.call.id)


def _read(content: bytes, cut_off: bool) -> tuple[dict[str, list[Block]], int]:
    """Return the blocks of each answer in a file by message id, and the number of lines that cannot be read.

    Each block is a line of its own. The last line of a log that was `cut_off` may be incomplete.
    """
    messages: dict[str, list[Block]] = {}
    seen: set[str] = set()
    unreadable: list[int] = []
    lines = content.splitlines()
    for number, text in enumerate(lines):
        if not text.strip():
            continue
        try:
            line = decoded(_decode_line, text)
            if line.type != "assistant" or line.isApiErrorMessage or line.uuid in seen:
                continue
            message = decoded(_decode_message, bytes(line.message))
            if message.model == _SYNTHETIC_MODEL:
                continue
            blocks = read_response(bytes(line.message)) or ()
        except (msgspec.MsgspecError, ValueError, RecursionError):
            unreadable.append(number)
            continue
        if line.uuid:
            seen.add(line.uuid)
        messages.setdefault(message.id, []).extend(blocks)
    if cut_off and unreadable[-1:] == [len(lines) - 1]:
        unreadable.pop()
    return messages, len(unreadable)


def _message_id(node: Node) -> str:
    """Return the id of the answer in the CLI's log: the provider's own if its answers are passed on."""
    try:
        return decoded(_decode_id, node.call.response).id
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return ""


def _response_blocks(node: Node) -> tuple[Block, ...]:
    """Return the blocks of a call's answer, or of the gateway's final answer if the budget was used up."""
    if node.answer is not None:
        return node.answer
    try:
        return read_response(node.call.response) or ()
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return ()


def _may_be_missing(node: Node, cut_off: bool) -> bool:
    """Return whether the CLI has a reason not to log an answer."""
    return (
        node.superseded
        or node.alternative
        or node.role in _UNLOGGED_ROLES
        or not (_text(node.answer or ()) or _tool_calls(node.answer or ()))
        or (cut_off and not node.children)
    )


# --- what must be equal --------------------------------------------------------------------------------


def _difference(response: tuple[Block, ...], logged: list[Block]) -> str | None:
    """Return how a logged response differs from the stored one; None if they are equal."""
    if (text := _text(response)) != (logged_text := _text(logged)):
        return f"the log has the answer's text otherwise: {_first_difference(text, logged_text)}"
    calls, logged_calls = _tool_calls(response), _tool_calls(logged)
    names, logged_names = [(b.id, b.name) for b in calls], [(b.id, b.name) for b in logged_calls]
    if names != logged_names:
        return f"the log has other tool calls in the answer: {_short(logged_names)}, not {_short(names)}"
    for call, echo in zip(calls, logged_calls, strict=True):
        if not _same_inputs(call.arguments, echo.arguments):
            excerpt = f"{call.id[:_EXCERPT_LENGTH]} ({call.name[:_EXCERPT_LENGTH]})"
            difference = _first_difference(call.arguments, echo.arguments)
            return f"the log has other inputs of tool call {excerpt}: {difference}"
    return None


def _text(blocks: list[Block] | tuple[Block, ...]) -> str:
    """Return the text of an answer, without blank blocks and outer white space, which the CLI drops."""
    return "\n".join(text for b in blocks if b.kind == "text" and (text := b.text.strip()))


def _tool_calls(blocks: list[Block] | tuple[Block, ...]) -> list[Block]:
    return [block for block in blocks if block.kind == "tool_use"]


def _same_inputs(response: str, logged: str) -> bool:
    """Return whether a tool call's arguments in the model's response equal those in the session log.

    Ignored are defaults that the CLI adds, and differences that `_normalised` removes.
    """
    try:
        answered_input, logged_input = (
            _normalised(msgspec.json.decode(response)),
            _normalised(msgspec.json.decode(logged)),
        )
    except msgspec.DecodeError:
        return True  # Arguments that are no JSON: what the CLI keeps of them, it writes in a form of its own.
    except (RecursionError, OverflowError):
        return response == logged
    if not (isinstance(answered_input, dict) and isinstance(logged_input, dict)):
        return answered_input == logged_input
    response_inputs, logged_inputs = cast(dict[str, Any], answered_input), cast(dict[str, Any], logged_input)
    return all(key in logged_inputs and logged_inputs[key] == value for key, value in response_inputs.items())


def _normalised(value: Any) -> Any:
    """Return a JSON value with numbers as JavaScript writes them, and no white space at the ends of lines."""
    if isinstance(value, dict):
        return {key: _normalised(item) for key, item in cast(dict[str, Any], value).items()}
    if isinstance(value, list):
        return [_normalised(item) for item in cast(list[Any], value)]
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return _without_trailing_space(value) if isinstance(value, str) else value


def _without_trailing_space(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.splitlines()).rstrip()


def _first_difference(text: str, logged_text: str) -> str:
    index = next(
        (n for n, (a, b) in enumerate(zip(text, logged_text, strict=False)) if a != b),
        min(len(text), len(logged_text)),
    )
    start = max(0, index - 20)
    return f"{_short(logged_text[start:])}, not {_short(text[start:])}, from character {index}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _EXCERPT_LENGTH else f"{text[:_EXCERPT_LENGTH]}…"
