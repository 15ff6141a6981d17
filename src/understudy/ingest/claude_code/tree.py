"""Conversations that are sent otherwise than they came to be: compacted, cleared, or read from the log again.

What changes is a new branch of the tree, so that turns from before keep what they were sent.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import zip_longest

import msgspec
from msgspec import Struct

from understudy.ingest.claude_code.records import ClaudeBlock, ClaudeRecord
from understudy.ingest.trace import TraceNode

MIN_UNIQUE_ID_LENGTH = 12
"""Message ids of fewer characters are not taken to be unique."""


class ClaudeResponse(Struct, gc=False):
    """One answer of the model: all lines with its message id, in the order of the file.

    `node` is its place, `tail` that of the last result it has so far; `open` are the tool calls without a result.
    `hides_plans` as in `claude_code_versions`.
    """

    key: str
    records: list[ClaudeRecord]
    node: int
    tail: int
    pending: list[str]
    hides_plans: bool


class TrimmedResponse(Struct, gc=False, frozen=True):
    """An answer of which only these tool calls were sent back."""

    response: ClaudeResponse
    tool_use_ids: frozenset[str]


class ClearedRecord(Struct, gc=False, frozen=True):
    """A record whose tool results of these ids were cleared to make room."""

    record: ClaudeRecord
    tool_use_ids: frozenset[str]


class _PreservedSegment(Struct):
    headUuid: str | None = None
    anchorUuid: str | None = None
    tailUuid: str | None = None


class _PreservedMessages(Struct):
    anchorUuid: str | None = None
    uuids: list[str] = []
    allUuids: list[str] | None = None


class _Compaction(Struct):
    preservedSegment: _PreservedSegment | None = None
    preservedMessages: _PreservedMessages | None = None


class _Microcompaction(Struct):
    compactedToolIds: list[str] = []


_compaction = msgspec.json.Decoder(_Compaction).decode
_microcompaction = msgspec.json.Decoder(_Microcompaction).decode


def preserved_messages(
    boundary: ClaudeRecord, by_uuid: Mapping[str, ClaudeRecord]
) -> tuple[str | None, list[str]]:
    """Which record the messages that a compaction kept stand behind (None: none were kept), and their uuids.

    Raises one of `FAULTS` where the boundary is not as it should be.
    """
    if not bytes(boundary.compactMetadata):
        return None, []
    compaction = _compaction(boundary.compactMetadata)
    messages, segment = compaction.preservedMessages, compaction.preservedSegment
    if messages is not None and messages.anchorUuid and messages.uuids:
        return messages.anchorUuid, messages.allUuids or messages.uuids
    if segment is None or not segment.anchorUuid or not segment.tailUuid:
        return None, []
    uuids: list[str] = []
    step: str | None = segment.tailUuid
    while step is not None and (record := by_uuid.get(step)) is not None and len(uuids) < len(by_uuid):
        uuids.append(step)
        step = record.parentUuid if step != segment.headUuid else None
    return segment.anchorUuid, uuids[::-1]


def cleared_tool_calls(boundary: ClaudeRecord) -> frozenset[str]:
    """The tool calls whose results a microcompaction cleared. Raises one of `FAULTS`."""
    if not bytes(boundary.microcompactMetadata):
        return frozenset()
    return frozenset(_microcompaction(boundary.microcompactMetadata).compactedToolIds)


def path_with_cleared_results(nodes: list[TraceNode], at: int, ids: frozenset[str]) -> int:
    """The way to `at`, without these results. Returns its end."""
    bodies: list[object] = []
    changed: dict[int, object] = {}
    step = at
    while step >= 0:
        body = nodes[step].body
        if isinstance(body, ClaudeRecord) and (hit := ids.intersection(result_ids(body))):
            changed[len(bodies)] = ClearedRecord(body, hit)
        elif isinstance(body, ClearedRecord) and (
            hit := ids.intersection(result_ids(body.record)) - body.tool_use_ids
        ):
            changed[len(bodies)] = ClearedRecord(body.record, hit | body.tool_use_ids)
        bodies.append(body)
        step = nodes[step].parent
    return _copy_path(nodes, at, bodies, changed)


def path_after_resume(nodes: list[TraceNode], at: int, met: set[int]) -> int:
    """The way to `at` with only those results whose records (by `id`) are in `met`, and the calls of those."""
    bodies: list[object] = []
    changed: dict[int, object] = {}
    answered_calls: set[str] = set()
    lost: set[str] = set()
    step = at
    while step >= 0:
        body = nodes[step].body
        if isinstance(body, ClaudeRecord) and (ids := result_ids(body)):
            if id(body) in met:
                answered_calls.update(ids)
            else:
                lost.update(ids)
                changed[len(bodies)] = None
        elif isinstance(body, ClaudeResponse) and not lost.isdisjoint(calls := _call_ids(body)):
            changed[len(bodies)] = TrimmedResponse(body, frozenset(calls) & answered_calls)
        bodies.append(body)
        step = nodes[step].parent
    return _copy_path(nodes, at, bodies, changed)


def path_without_pending_calls(nodes: list[TraceNode], at: int, answer: ClaudeResponse) -> int:
    """The way to `at`, which is an answer's results, without those of its calls that have none."""
    bodies: list[object] = []
    step = at
    while step >= 0 and nodes[step].body is not answer:
        bodies.append(nodes[step].body)
        step = nodes[step].parent
    if step < 0:
        return at
    answered_calls = frozenset(_call_ids(answer)).difference(answer.pending)
    return _copy_path(nodes, at, [*bodies, answer], {len(bodies): TrimmedResponse(answer, answered_calls)})


def repeat_response(nodes: list[TraceNode], at: int, answer: ClaudeResponse) -> int:
    """An answer and its results, which end at `at`, a second time behind them."""
    bodies: list[object] = []
    step = at
    while step >= 0 and nodes[step].body is not answer:
        bodies.append(nodes[step].body)
        step = nodes[step].parent
    for body in (answer, *reversed(bodies)):
        nodes.append(TraceNode(at, body))
        at = len(nodes) - 1
    return at


def _copy_path(nodes: list[TraceNode], at: int, bodies: list[object], changed: Mapping[int, object]) -> int:
    """The way to `at` (its `bodies` from there to the beginning) with some `changed`, or left out for None."""
    if not changed:
        return at
    first = max(changed)
    for _ in range(first + 1):
        at = nodes[at].parent
    for index in range(first, -1, -1):
        body = changed.get(index, bodies[index])
        if body is not None:
            nodes.append(TraceNode(at, body))
            at = len(nodes) - 1
    return at


def result_ids(record: ClaudeRecord) -> list[str]:
    """The tool calls that a record has results of."""
    content = record.message.content if record.message is not None else None
    if not isinstance(content, list):
        return []
    return [
        block.tool_use_id for block in content if isinstance(block, ClaudeBlock) and block.tool_use_id is not None
    ]


def _call_ids(answer: ClaudeResponse) -> list[str]:
    return [
        block.id
        for line in answer.records
        if line.message is not None and isinstance(line.message.content, list)
        for block in line.message.content
        if isinstance(block, ClaudeBlock) and block.type == "tool_use" and block.id is not None
    ]


def is_reused_id(answer: ClaudeResponse, record: ClaudeRecord) -> bool:
    """Whether a message id stands for another answer: some servers give one id to all of them."""
    first = answer.records[0]
    if record.requestId is not None and first.requestId is not None and record.requestId != first.requestId:
        return True
    return len(answer.key) < MIN_UNIQUE_ID_LENGTH and record.parentUuid != first.parentUuid


def inherited_notes(nodes: Sequence[TraceNode], damage: Mapping[int, str]) -> dict[int, tuple[str, ...]]:
    """Why the way to a node is damaged, for all nodes behind a damage."""
    if not damage:
        return {}
    notes: dict[int, tuple[str, ...]] = {}
    # A node stands behind its parent.
    for index in range(min(damage), len(nodes)):
        inherited = notes.get(nodes[index].parent, ())
        own = damage.get(index)
        if own is not None and own not in inherited:
            inherited = (*inherited, own)
        if inherited:
            notes[index] = inherited
    return notes


def active_responses(nodes: Sequence[TraceNode], at: int, boundaries: Collection[tuple[int, int]]) -> set[str]:
    """The answers on the way to the last node, `at`; a compaction does not end it.

    `boundaries` has for each compaction how many nodes there were before it, and the last on the way to it.
    """
    keys: set[str] = set()
    bounds = list(boundaries)
    while at >= 0:
        node = nodes[at]
        body = node.body
        if type(body) is ClaudeResponse:
            keys.add(body.key)
        elif type(body) is TrimmedResponse:
            keys.add(body.response.key)
        beginning, at = at, node.parent
        if at < 0:
            while bounds and bounds[-1][0] > beginning:
                bounds.pop()
            at = bounds.pop()[1] if bounds else -1
    return keys


def only_prompt(records: Sequence[ClaudeRecord]) -> str | None:
    """The uuid of a session's one plain prompt, "" where there is none or there are more.

    In print mode there is one. Those of before, which were copied into a new file, are lists of blocks there, or
    were written in one moment with their answers.
    """
    prompts = [
        record.uuid
        for record, after in zip_longest(records, records[1:])
        if record.type == "user"
        and record.message is not None
        and isinstance(record.message.content, str)
        and not record.isSidechain
        and (after is None or not _written_together(record, after))
    ]
    return prompts[0] if len(prompts) == 1 else ""


def _written_together(record: ClaudeRecord, after: ClaudeRecord) -> bool:
    """Whether two records were written in one moment, which an answer takes longer than."""
    try:
        passed = datetime.fromisoformat(after.timestamp or "") - datetime.fromisoformat(record.timestamp or "")
    except (TypeError, ValueError):  # of which one may have a time zone
        return False
    return abs(passed) < timedelta(milliseconds=20)
