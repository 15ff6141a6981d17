"""The tree of a Claude Code conversation: what its nodes hold, and how a path is copied when it is sent
differently later.

The CLI may change what it sent before: it compacts the conversation, clears old results, or reads the log again on
resume. Each change becomes a new branch, so that earlier turns keep exactly what they were sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import zip_longest

import msgspec
from msgspec import Raw, Struct

from understudy.ingest.claude_code.records import ClaudeBlock, ClaudeRecord, seconds_between
from understudy.ingest.trace import TraceNode

MIN_UNIQUE_ID_LENGTH = 12
"""Shorter message ids are not assumed to be unique: some servers count from 1 in each session."""


KNOWN_BLOCKS = frozenset(("text", "tool_use", "tool_result", "thinking", "redacted_thinking", "image"))
"""The types of blocks that can be rendered."""


class ClaudeResponse(Struct, gc=False):
    """One response of the model: all records with its message id, in file order.

    `key`: the message id. `node`: the index of the response's node. `tail`: the node of the last result so far.
    `pending`: the ids of its tool calls that have no result yet. `hides_plans`, `renames_starter`: see
    `VersionBehaviour`.
    """

    key: str
    records: list[ClaudeRecord]
    node: int
    tail: int
    pending: list[str]
    hides_plans: bool
    renames_starter: bool


class TrimmedResponse(Struct, gc=False, frozen=True):
    """A response of which only the tool calls with these ids are sent back to the model."""

    response: ClaudeResponse
    tool_use_ids: frozenset[str]


class SentRecord(Struct, gc=False, frozen=True):
    """A user record that is sent in a different form than it was logged.

    `cleared`: the ids of tool calls whose results are replaced by a placeholder, to save context. `added`: texts
    and images that are sent with the record, after its last tool result or before a prompt. `forgot_images`: its
    own images are sent as the text `[image]`.
    """

    record: ClaudeRecord
    cleared: frozenset[str] = frozenset()
    added: tuple[str | ClaudeBlock, ...] = ()
    forgot_images: bool = False
    extends_lists: bool = False

    def with_added(self, parts: Sequence[str | ClaudeBlock], *, extends_lists: bool) -> SentRecord:
        """Return a copy with more parts added. `extends_lists`: see `VersionBehaviour`."""
        return msgspec.structs.replace(self, added=(*self.added, *parts), extends_lists=extends_lists)


class ClaudeConversation(Struct):
    """The conversation of one agent.

    `notes`: for each node at or after damage in the log, what is damaged. `active`: the keys of the responses on
    the path to the last record. `snapshot`: the attachment with the system prompt, or None.
    """

    nodes: list[TraceNode]
    responses: list[ClaudeResponse]
    notes: dict[int, tuple[str, ...]]
    active: set[str]
    snapshot: Raw | None
    losses: Counter[str]


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
    """Return which messages a compaction preserved: the uuid of the record they follow, and their own uuids.

    Returns (None, []) if none were preserved. Later versions list the messages; earlier ones name the first and
    the last. Raises one of `DECODE_ERRORS` if the boundary record is malformed.
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
    """Return the ids of the tool calls whose results a microcompaction cleared. Raises one of `DECODE_ERRORS`."""
    if not bytes(boundary.microcompactMetadata):
        return frozenset()
    return frozenset(_microcompaction(boundary.microcompactMetadata).compactedToolIds)


def _bodies(nodes: Sequence[TraceNode], tip: int, end: object = None) -> list[object]:
    """Return the bodies from `tip` back to the root, or back to the node just after the one with body `end`."""
    bodies: list[object] = []
    while tip >= 0 and (end is None or nodes[tip].body is not end):
        bodies.append(nodes[tip].body)
        tip = nodes[tip].parent
    return bodies


def path_with_cleared_results(nodes: list[TraceNode], tip: int, ids: frozenset[str]) -> int:
    """Copy the path to `tip` with the results of these calls cleared. Returns the last node of the copy."""
    bodies = _bodies(nodes, tip)
    changed: dict[int, object] = {}
    for index, body in enumerate(bodies):
        results = sent_record(body)
        if results is not None and (cleared := ids.intersection(result_ids(results.record)) - results.cleared):
            changed[index] = msgspec.structs.replace(results, cleared=cleared | results.cleared)
    return _copy_path(nodes, tip, bodies, changed)


def path_without(nodes: list[TraceNode], tip: int, dropped: Collection[int], *, added: bool = False) -> int:
    """Copy the path to `tip` without the nodes in `dropped`, and with `added` also without texts added to records.

    Returns the last node of the copy.
    """
    bodies = _bodies(nodes, tip)
    changed: dict[int, object] = {}
    node = tip
    for index, body in enumerate(bodies):
        if node in dropped:
            changed[index] = None
        elif added and isinstance(body, SentRecord) and body.added:
            changed[index] = msgspec.structs.replace(body, added=())
        node = nodes[node].parent
    return _copy_path(nodes, tip, bodies, changed)


def has_image(record: ClaudeRecord) -> bool:
    """Return whether a prompt contains an image or a document itself. Those in tool results do not count."""
    content = record.message.content if record.message is not None else None
    if not isinstance(content, list):
        return False
    return any(isinstance(block, ClaudeBlock) and block.type in ("image", "document") for block in content)


def has_unknown_block(content: Iterable[ClaudeBlock | str]) -> bool:
    """Return whether any block has a type that cannot be rendered."""
    return any(isinstance(block, ClaudeBlock) and block.type not in KNOWN_BLOCKS for block in content)


def path_without_images(nodes: list[TraceNode], tip: int) -> int:
    """Copy the path to `tip` with the images of prompts replaced by text. Returns the last node of the copy."""
    bodies = _bodies(nodes, tip)
    changed: dict[int, object] = {}
    for index, body in enumerate(bodies):
        sent = sent_record(body)
        if sent is not None and not sent.forgot_images and has_image(sent.record):
            changed[index] = msgspec.structs.replace(sent, forgot_images=True)
    return _copy_path(nodes, tip, bodies, changed)


def path_after_resume(nodes: list[TraceNode], tip: int, reached: set[int]) -> int:
    """Copy the path to `tip`, keeping only results whose records (by Python's `id()`) are in `reached`.

    Tool calls that lost their result are removed too. Returns the last node of the copy.
    """
    bodies = _bodies(nodes, tip)
    changed: dict[int, object] = {}
    answered_calls: set[str] = set()
    lost_calls: set[str] = set()
    for index, body in enumerate(bodies):
        results = sent_record(body)
        if results is not None and (ids := result_ids(results.record)):
            if id(results.record) in reached:
                answered_calls.update(ids)
            else:
                lost_calls.update(ids)
                changed[index] = None
        elif isinstance(body, ClaudeResponse) and not lost_calls.isdisjoint(calls := _call_ids(body)):
            changed[index] = TrimmedResponse(body, frozenset(calls) & answered_calls)
    return _copy_path(nodes, tip, bodies, changed)


def results_beside(
    record: ClaudeRecord, results: Sequence[ClaudeRecord], by_uuid: Mapping[str, ClaudeRecord]
) -> list[ClaudeRecord]:
    """Those of these results that following `parentUuid` from a record misses."""
    missing = {result.uuid for result in results}
    first_uuid = results[0].uuid
    step = record.parentUuid
    for _ in range(len(by_uuid)):
        if step is None or (ancestor := by_uuid.get(step)) is None:
            break
        missing.discard(step)
        if not missing or step == first_uuid:
            break
        if ancestor.type == "user" and not result_ids(ancestor):
            break  # an earlier prompt: the results that are still missing came after it
        step = ancestor.parentUuid
    return [result for result in results if result.uuid in missing] if missing else []


def path_without_pending_calls(nodes: list[TraceNode], tip: int, response: ClaudeResponse) -> int:
    """Append to `nodes` a copy of the path to `tip`, the last result of `response`, without the calls that have no
    result.

    Returns the index of the copy's last node; `tip` itself, and no copy, if the response is not on the path.
    """
    bodies = _bodies(nodes, tip, response)
    node = tip
    for _ in bodies:
        node = nodes[node].parent
    if node < 0:
        return tip  # the response is not on the path
    answered_calls = frozenset(_call_ids(response)).difference(response.pending)
    return _copy_path(nodes, tip, [*bodies, response], {len(bodies): TrimmedResponse(response, answered_calls)})


def repeat_response(nodes: list[TraceNode], tip: int, response: ClaudeResponse) -> int:
    """Append a second copy of a response and its results, which end at `tip`. Returns the last node."""
    for body in (response, *reversed(_bodies(nodes, tip, response))):
        nodes.append(TraceNode(tip, body))
        tip = len(nodes) - 1
    return tip


def _copy_path(nodes: list[TraceNode], tip: int, bodies: list[object], changed: Mapping[int, object]) -> int:
    """Copy the path to `tip` with some bodies changed; a body that `changed` maps to None is left out.

    `bodies` are those from `tip` back to the root, and `changed` is keyed by index into it. Nodes before the first
    change are shared with the old path. Returns the last node.
    """
    if not changed:
        return tip
    earliest = max(changed)
    for _ in range(earliest + 1):
        tip = nodes[tip].parent
    for index in range(earliest, -1, -1):
        body = changed.get(index, bodies[index])
        if body is not None:
            nodes.append(TraceNode(tip, body))
            tip = len(nodes) - 1
    return tip


def sent_record(body: object) -> SentRecord | None:
    """Return a node's body as a SentRecord, or None if it is not a user record."""
    return SentRecord(body) if isinstance(body, ClaudeRecord) else body if isinstance(body, SentRecord) else None


def result_ids(record: ClaudeRecord) -> list[str]:
    """Return the ids of the tool calls whose results a record holds."""
    content = record.message.content if record.message is not None else None
    if not isinstance(content, list):
        return []
    return [
        block.tool_use_id for block in content if isinstance(block, ClaudeBlock) and block.tool_use_id is not None
    ]


def _call_ids(response: ClaudeResponse) -> list[str]:
    return [
        block.id
        for record in response.records
        if record.message is not None and isinstance(record.message.content, list)
        for block in record.message.content
        if isinstance(block, ClaudeBlock) and block.type == "tool_use" and block.id is not None
    ]


def is_new_branch(
    nodes: Sequence[TraceNode],
    response: ClaudeResponse,
    responses: Iterable[ClaudeResponse],
    parent: ClaudeRecord | None,
) -> bool:
    """Return whether a record whose parent is `parent` begins a new branch, which is so if its parent is a tool
    result and another response already follows the end of `response`.
    """
    if parent is None or not result_ids(parent):
        return False
    return any(nodes[candidate.node].parent == response.tail for candidate in responses)


def is_reused_id(response: ClaudeResponse, record: ClaudeRecord) -> bool:
    """Return whether a record reuses a response's message id without belonging to it: some servers give every
    response one id.
    """
    first = response.records[0]
    if record.requestId is not None and first.requestId is not None and record.requestId != first.requestId:
        return True
    return len(response.key) < MIN_UNIQUE_ID_LENGTH and record.parentUuid != first.parentUuid


def is_older_than_summary(record: ClaudeRecord, body: object) -> bool:
    """Return whether a response that follows a summary (`body`) was written before it, in reply to messages that
    are not logged.
    """
    if not isinstance(body, ClaudeRecord) or not body.isCompactSummary:
        return False
    elapsed_s = seconds_between(body.timestamp, record.timestamp)
    return elapsed_s is not None and elapsed_s < 0


def inherited_notes(
    nodes: Sequence[TraceNode], damage: Mapping[int, tuple[str, ...]]
) -> dict[int, tuple[str, ...]]:
    """Return for each node at or after damage the notes on all damage on its path."""
    if not damage or not nodes:
        return {}
    # Paths may have been copied; copies are recognised by having the same body objects.
    notes_of_body = {id(nodes[index].body): node_notes for index, node_notes in damage.items()}
    notes: dict[int, tuple[str, ...]] = {}
    # Parents come before their children in the list, so one pass is enough.
    for index in range(min(damage), len(nodes)):
        inherited = notes.get(nodes[index].parent, ())
        node_notes = notes_of_body.get(id(nodes[index].body), ())
        inherited += tuple(note for note in node_notes if note not in inherited)
        if inherited:
            notes[index] = inherited
    return notes


def active_responses(nodes: Sequence[TraceNode], tip: int, boundaries: Collection[tuple[int, int]]) -> set[str]:
    """Return the keys of the responses on the path to `tip`, the last node, and on the paths that compactions
    ended.

    `boundaries` has for each compaction the number of nodes before it, and the last node before it.
    """
    keys: set[str] = set()
    remaining = list(boundaries)
    while tip >= 0:
        node = nodes[tip]
        body = node.body
        if type(body) is ClaudeResponse:
            keys.add(body.key)
        elif type(body) is TrimmedResponse:
            keys.add(body.response.key)
        root, tip = tip, node.parent
        if tip < 0:
            while remaining and remaining[-1][0] > root:
                remaining.pop()
            tip = remaining.pop()[1] if remaining else -1
    return keys


def only_prompt(records: Sequence[ClaudeRecord]) -> str | None:
    """Return the uuid of a session's only plain prompt, or "" if there is none or more than one.

    A session in print mode has exactly one. Prompts that were copied into the file by a resume are recognised
    because they are lists of blocks, or were written at the same moment as their responses.
    """
    prompts = [
        record.uuid
        for record, next_record in zip_longest(records, records[1:])
        if record.type == "user"
        and record.message is not None
        and isinstance(record.message.content, str)
        and not record.isSidechain
        and (next_record is None or not _written_together(record, next_record))
    ]
    return prompts[0] if len(prompts) == 1 else ""


def _written_together(record: ClaudeRecord, next_record: ClaudeRecord) -> bool:
    """Return whether two records were written within 20 ms of each other: faster than any model responds."""
    elapsed_s = seconds_between(record.timestamp, next_record.timestamp)
    return elapsed_s is not None and abs(elapsed_s) < 0.02
