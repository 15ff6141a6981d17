"""Adds the lists of agents and skills to the log of a subagent that was sent them but does not log them."""

from __future__ import annotations

from collections.abc import Sequence

from understudy.ingest.claude_code.records import ClaudeRecord
from understudy.ingest.claude_code.render import value_of
from understudy.ingest.claude_code.tree import result_ids
from understudy.ingest.json_values import items, mapping

_AGENTS, _SKILLS = b'"agent_listing_delta"', b'"skill_listing"'
_STARTERS = frozenset(("Agent", "Task"))
_HAS_ALL_TOOLS = "general-purpose"


def with_lists(
    records: Sequence[ClaudeRecord], agent: str, main: Sequence[ClaudeRecord]
) -> Sequence[ClaudeRecord]:
    """Return a subagent's records, with the main agent's lists after its first tool results, where they are sent.

    A subagent is sent a list if it has the tool that needs it: the list of agents says which agents have theirs,
    that of skills does not, so only the agent with all tools gets it. The records are returned unchanged if their
    log has lists of its own, the main agent's has none, or no response follows results.
    """
    lists: list[ClaudeRecord] = []
    for kind in (_SKILLS, _AGENTS):
        sent = next((record for record in main if _is_list(record, kind)), None)
        if sent is None or any(_is_list(record, kind) for record in records):
            continue
        if agent == _HAS_ALL_TOOLS if kind == _SKILLS else _may_start_agents(agent, sent):
            lists.append(sent)
    index = _after_first_results(records) if lists else None
    if index is None:
        return records
    response = records[index]
    added: list[ClaudeRecord] = []
    for number, record in enumerate(lists):
        uuid = f"list-{number}-sent-before-{response.uuid}"
        added.append(
            ClaudeRecord(
                type="attachment",
                uuid=uuid,
                parentUuid=response.parentUuid,
                isSidechain=True,
                attachment=record.attachment,
            )
        )
        response.parentUuid = uuid
    return [*records[:index], *added, *records[index:]]


def _is_list(record: ClaudeRecord, kind: bytes) -> bool:
    return record.type == "attachment" and kind in bytes(record.attachment)[:80]


def _after_first_results(records: Sequence[ClaudeRecord]) -> int | None:
    """Return the index of the first record of the first response that follows tool results."""
    previous_key = ""
    has_results = False
    for index, record in enumerate(records):
        has_results = has_results or bool(result_ids(record))
        if record.type == "assistant" and record.message is not None:
            key = record.message.id or record.uuid or ""
            if has_results and key != previous_key:
                return index
            previous_key = key
    return None


def _may_start_agents(agent: str, agents: ClaudeRecord) -> bool:
    lines = items(mapping(value_of(agents.attachment)).get("addedLines"))
    line = next((line for line in lines if isinstance(line, str) and line.startswith(f"- {agent}: ")), "")
    tools = line.rpartition("(Tools: ")[2].removesuffix(")")
    return tools == "*" or not _STARTERS.isdisjoint(tools.split(", "))
