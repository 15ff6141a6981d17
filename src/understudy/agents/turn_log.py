"""Compares the responses in an agent's own log with the stored calls: they must be equal and in the same order.

The log was written in a sandbox under the model's control, so it is hostile input: whatever it contains leads to
findings, never to an error.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import islice, zip_longest
from typing import Any, cast

import msgspec
from msgspec import Struct

from understudy.agents.session_log import FINDING_KIND, FINDINGS_LIMIT
from understudy.ingest.formats.base import LogFormat
from understudy.ingest.log_files import LogFile
from understudy.trajectory.tree import Node, Trajectory
from understudy.types import Finding
from understudy.wire.arguments import parse_object, with_doubles
from understudy.wire.decoding import UNREADABLE, decoded
from understudy.wire.stored import response_blocks

_EXCERPT_LENGTH = 120
_UNLOGGED_ROLES = ("compaction", "auxiliary")


class LoggedTurn(Struct, frozen=True):
    """A response of the model: its text, and the names and arguments (JSON) of its tool calls."""

    text: str
    calls: tuple[tuple[str, str], ...] = ()

    @property
    def key(self) -> tuple[str, tuple[tuple[str, str], ...]]:
        """The values that must be equal: the text without outer white space, and the values of the arguments."""
        return self.text.strip(), tuple((name, _sorted_arguments(arguments)) for name, arguments in self.calls)


def read_turns(format: LogFormat, files: Mapping[str, bytes]) -> Iterator[LoggedTurn]:
    """Return the turns that a format of `ingest` reads from logs."""

    def log_file(name: str, content: bytes) -> LogFile:
        return LogFile(name, len(content), lambda: io.BytesIO(content))

    for trace in format.read([log_file(name, content) for name, content in sorted(files.items())]):
        for turn in trace.turns:
            action = trace.renderer.action([trace.nodes[index].body for index in turn.action])
            functions = [call["function"] for call in action.tool_calls]
            yield LoggedTurn(
                action.content or "", tuple((function["name"], function["arguments"]) for function in functions)
            )


def compare_turns(
    logged: Iterable[LoggedTurn],
    trajectory: Trajectory,
    *,
    cut_off: bool,
    must_log: Callable[[LoggedTurn], bool] = lambda _: True,
) -> list[Finding]:
    """Return how the logged turns differ from the responses of the calls; empty if they agree.

    Responses to requests for titles and summaries are not compared, nor are empty ones. A response whose request
    was retried may be in the log, and so may the gateway's final response when a budget was used up. Some agents
    repair arguments that are not JSON before they log them. `cut_off`: the agent was stopped or crashed, so its
    last responses may be missing. `must_log` says whether a response has to be in the log.
    """
    filled = (turn for turn in logged if turn.text.strip() or turn.calls)
    # What a log has beyond the calls differs in any case: it is only counted, as comparing it could take minutes.
    turns = list(islice(filled, len(trajectory.nodes) + FINDINGS_LIMIT))
    more = sum(1 for _ in filled)
    nodes = [node for node in trajectory.nodes if _is_logged(node)]
    answers = [answered_turn(node) for node in nodes]
    findings: list[Finding] = []
    matcher = SequenceMatcher(None, [turn.key for turn in turns], [turn.key for turn in answers], autojunk=False)
    for tag, first, last, low, high in matcher.get_opcodes():
        if tag == "equal" or (tag == "insert" and cut_off and high == len(answers)):
            continue
        unmatched_turns, unmatched_nodes = turns[first:last], list[Node]()
        for node in nodes[low:high]:
            answer = answered_turn(node)
            if (
                repaired := next((turn for turn in unmatched_turns if _is_repaired(turn, answer)), None)
            ) is not None:
                unmatched_turns.remove(repaired)
            elif node.call.status == "ok" and not node.superseded and must_log(answer):
                unmatched_nodes.append(node)
        for turn, node in zip_longest(unmatched_turns, unmatched_nodes):
            findings.append(_finding(turn, node))
    if len(findings) + bool(more) > FINDINGS_LIMIT:
        more += len(findings) - FINDINGS_LIMIT + 1
        findings = findings[: FINDINGS_LIMIT - 1]
    return [*findings, Finding(kind=FINDING_KIND, message=f"and {more} more differences")] if more else findings


def _is_logged(node: Node) -> bool:
    return (
        node.role not in _UNLOGGED_ROLES
        and not (node.alternative or (node.superseded and node.call.status != "ok"))
        and bool(answered_turn(node).text.strip() or answered_turn(node).calls)
    )


def _is_repaired(turn: LoggedTurn, answer: LoggedTurn) -> bool:
    """Return whether a logged turn differs from an answer only in arguments that are not JSON in the answer."""
    if turn.text.strip() != answer.text.strip() or len(turn.calls) != len(answer.calls):
        return False
    return all(
        name == answered_name
        and (_sorted_arguments(logged) == _sorted_arguments(answered) or parse_object(answered) is None)
        for (name, logged), (answered_name, answered) in zip(turn.calls, answer.calls, strict=True)
    )


def answered_turn(node: Node) -> LoggedTurn:
    """Return what a call was answered with, as a log should have it."""
    call = node.call
    blocks = (node.answer if call.status == "ok" else response_blocks(call.dialect, call.response)) or ()
    text = "\n".join(block.text for block in blocks if block.kind == "text" and block.text.strip())
    return LoggedTurn(text, tuple((block.name, block.arguments) for block in blocks if block.kind == "tool_use"))


def _finding(turn: LoggedTurn | None, node: Node | None) -> Finding:
    if node is None:
        return Finding(kind=FINDING_KIND, message=f"the log has a response that no call has: {_short(turn)}")
    call, answer = node.call, answered_turn(node)
    if turn is None:
        return Finding(
            kind=FINDING_KIND, message=f"the answer of call {call.sequence} is not in the log", call_id=call.id
        )
    what = f"the log has the answer of call {call.sequence} otherwise: {_short(turn)}, not {_short(answer)}"
    return Finding(kind=FINDING_KIND, message=what, call_id=call.id)


def _sorted_arguments(arguments: str) -> str:
    """Return arguments as JSON with sorted keys and numbers as JavaScript writes them, in which most agents are
    written. No text is an empty object. A single text may be in a field, or not be in an object.
    """
    if not arguments.strip():
        return "{}"
    try:
        value: Any = decoded(msgspec.json.decode, arguments.encode())
    except UNREADABLE:
        return arguments
    text = cast(dict[str, Any], value).get("input") if isinstance(value, dict) else None
    if isinstance(text, str) and len(cast(dict[str, Any], value)) == 1:
        return text
    try:
        return msgspec.json.encode(with_doubles(value), order="deterministic").decode()
    except (ValueError, RecursionError):
        return arguments


def _short(turn: LoggedTurn | None) -> str:
    if turn is None:
        return "nothing"
    parts: Sequence[Any] = (turn.text, *turn.calls)
    text = ", ".join(repr(part) for part in parts if part)
    return text if len(text) <= _EXCERPT_LENGTH else f"{text[:_EXCERPT_LENGTH]}…"
