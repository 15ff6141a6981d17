"""Parent links that do not lead to what a response answered, and how a resumed session follows them.

When the program compacts the conversation in the middle of its work, it logs the boundary, the summary, and the
attachments sent with it, while the next response already arrives. Versions from 2.1.87 to 2.1.107 were seen to log
that response before the summary, as a child of the last record before the boundary, although the request began
with the summary. A session that is resumed later follows the links: it sends what was before the compaction again,
and no summary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from understudy.ingest.claude_code import tree
from understudy.ingest.claude_code.continuity import response_of
from understudy.ingest.claude_code.records import ClaudeRecord, seconds_between
from understudy.ingest.trace import TraceNode

_GAP_S = 5.0
"""The longest time between two records that the program joins although no link does (read in the programs)."""


def with_summaries_first(
    records: Sequence[ClaudeRecord],
) -> tuple[Sequence[ClaudeRecord], dict[str | None, str | None]]:
    """Return the records with each summary before the responses that it was sent for, and these as its children.

    Also returns the logged parent of each response whose parent was changed, by uuid. The records themselves are
    returned if none was.
    """
    boundary_of: dict[str | None, int] = {}
    for index, record in enumerate(records):
        if record.subtype == "compact_boundary":
            # The logical parent may be a record that is not logged, such as a reminder.
            parents = (record.logicalParentUuid, records[index - 1].uuid if index else None)
            boundary_of |= dict.fromkeys(parents, index)
    boundary_of.pop(None, None)
    late: dict[int, list[int]] = {}
    for index, record in enumerate(records) if boundary_of else ():
        boundary = boundary_of.get(record.parentUuid) if record.type == "assistant" else None
        if boundary is None or boundary >= index:
            continue
        if (record.timestamp or "") >= (records[boundary].timestamp or ""):
            late.setdefault(boundary, []).append(index)
    chains = {boundary: chain for boundary in late if (chain := _sent_with_summary(records, boundary))}
    if not chains:
        return records, {}
    placed = set[int]().union(*chains.values())
    ends = {index: records[chain[-1]].uuid for boundary, chain in chains.items() for index in late[boundary]}
    arranged: list[ClaudeRecord] = []
    for index, record in enumerate(records):
        if index not in placed:
            arranged.append(msgspec.structs.replace(record, parentUuid=ends[index]) if index in ends else record)
            arranged += [records[position] for position in chains.get(index, ())]
    return arranged, {records[index].uuid: records[index].parentUuid for index in ends}


def _sent_with_summary(records: Sequence[ClaudeRecord], boundary: int) -> list[int]:
    """Return the positions of a compaction's summary and the attachments linked to it; none without a summary."""
    chain: list[int] = []
    last_uuid, has_summary = records[boundary].uuid, False
    for index in range(boundary + 1, len(records)):
        record = records[index]
        if last_uuid is None or record.parentUuid != last_uuid:
            continue
        if record.type != "attachment" and not record.isCompactSummary:
            break
        has_summary = has_summary or bool(record.isCompactSummary)
        chain.append(index)
        last_uuid = record.uuid
    return chain if has_summary else []


def leads_nowhere(record: ClaudeRecord, previous: ClaudeRecord | None) -> bool:
    """Return whether a later resume finds nothing before this record, whose parent is not in the log.

    Its parent was written to another session's log, or not at all. The program then continues from the record
    before it, if that is not much older.
    """
    elapsed_s = seconds_between(previous.timestamp, record.timestamp) if previous is not None else None
    return elapsed_s is None or elapsed_s > _GAP_S


def path_by_logged_links(nodes: list[TraceNode], tip: int, ends: Mapping[str | None, int]) -> int:
    """Copy the path to `tip` as the logged links give it, and return its last node, or `tip` if they are right.

    `ends` has for each record whose link does not lead to what it was sent after the node that it leads to, -1 if
    it leads nowhere in this log.
    """
    bodies: list[object] = []
    since_link: list[object] = []
    node, base = tip, -1
    while node >= 0:
        body = nodes[node].body
        since_link.append(body)
        node = nodes[node].parent
        if (uuid := _uuid(body)) in ends:
            node = base = ends[uuid]
            bodies += since_link
            since_link.clear()
    if not bodies:
        return tip
    for body in reversed(bodies):
        nodes.append(TraceNode(base, body))
        base = len(nodes) - 1
    return base


def _uuid(body: object) -> str | None:
    response = response_of(body)
    record = tree.sent_record(body) if response is None else None
    return response.records[0].uuid if response is not None else record.record.uuid if record is not None else None
