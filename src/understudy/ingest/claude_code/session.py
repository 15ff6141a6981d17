"""The traces of one Claude Code session: its own conversation, and those of the subagents that it started."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from understudy.ingest.claude_code.ledger import LedgerRequests, RequestLedger, snapshot
from understudy.ingest.claude_code.records import DECODE_ERRORS, ClaudeBlock, ClaudeLog, ClaudeRecord
from understudy.ingest.claude_code.render import ClaudeCodeRenderer, text
from understudy.ingest.claude_code.tree import ClaudeResponse
from understudy.ingest.claude_code.versions import behaviour_of
from understudy.ingest.claude_code.walk import ClaudeConversation, build_conversation
from understudy.ingest.trace import Trace, TraceParent, TraceTurn

FORMAT_NAME = "claude-code"
SYNTHETIC_MODEL = "<synthetic>"
"""What stands for the model where the CLI itself writes in the assistant's name."""

_RENDERER = ClaudeCodeRenderer()
_OWN = re.compile(r"a([a-z][a-z_]+)-[0-9a-f]+")  # agents that the CLI starts for itself: `acompact-1a2b`
_STARTERS = ("Task", "Agent")


class AgentMeta(Struct, frozen=True):
    """The file beside a subagent's log, `agent-<id>.meta.json`."""

    agentType: str | None = None
    toolUseId: str | None = None
    spawnDepth: int | None = None


class SessionPart(Struct):
    """The records of one agent of a session, and the conversation that is built of them when it is needed."""

    log: ClaudeLog
    records: Sequence[ClaudeRecord]
    agent_id: str | None = None
    meta: AgentMeta = AgentMeta()
    conversation: ClaudeConversation | None = None

    def built(self) -> ClaudeConversation:
        """The conversation, which is built at the first call."""
        if self.conversation is None:
            records = self.log.records
            resumed = {records[end].uuid for end in self.log.ends if 0 < end < len(records)}
            self.conversation = build_conversation(self.records, behaviour_of(self.log.envelope.version), resumed)
        return self.conversation


class _TaskInput(Struct):
    prompt: str | None = None


class _TaskResult(Struct):
    agentId: str | None = None


_started = msgspec.json.Decoder(_TaskInput).decode
_outcome = msgspec.json.Decoder(_TaskResult).decode


def split_by_agent(log: ClaudeLog, agent_id: str | None, meta: AgentMeta) -> list[SessionPart]:
    """The records of a file by agent.

    Older versions write the records of subagents (`isSidechain`) into the session's own file. They do not name the
    agent, so each chain of records from a root is taken for one.
    """
    if agent_id is not None or not log.sidechains:
        return [SessionPart(log, log.records, agent_id, meta)]
    main: list[ClaudeRecord] = []
    asides: dict[str, list[ClaudeRecord]] = {}
    root: dict[str | None, str] = {}
    last = ""
    for record in log.records:
        if not record.isSidechain:
            main.append(record)
            continue
        last = root.get(record.parentUuid, last if record.parentUuid and last else record.uuid or "")
        root[record.uuid] = last
        asides.setdefault(last, []).append(record)
    return [SessionPart(log, main), *(SessionPart(log, records, name) for name, records in asides.items())]


class ClaudeSession:
    """The agents of a session, and which call started which of them."""

    def __init__(self, session_id: str, parts: Sequence[SessionPart], ledger: RequestLedger | None = None) -> None:
        self.session_id = session_id
        self.parts = parts
        self._ledger = ledger
        self._by_agent: dict[str, str] = {}
        self._by_prompt: dict[str, list[str]] = {}
        self._within: dict[str, SessionPart] = {}

    def traces(self, owned: dict[str, SessionPart], copied: Counter[int]) -> Iterator[Trace]:
        """A trace for each part, with the turns that `owned` (by message id) assigns to it.

        `copied` has, by Python's `id` of a part, how many of its turns were assigned to others.
        """
        if len(self.parts) > 1:
            for part in self.parts:
                self._index_agent_calls(part)
        counted: set[int] = set()
        for part in self.parts:
            trace = self._trace(part, owned)
            trace.losses += part.built().losses
            if id(part.log) not in counted:
                counted.add(id(part.log))
                trace.losses += part.log.losses
            if copied[id(part)]:
                trace.losses["copied-turn"] += copied[id(part)]
            yield trace

    def _trace(self, part: SessionPart, owned: dict[str, SessionPart]) -> Trace:
        conversation, envelope = part.built(), part.log.envelope
        agent_id = part.agent_id
        trace = Trace(
            trace_id=self.session_id if agent_id is None else f"{self.session_id}/{agent_id}",
            session_id=self.session_id,
            format=FORMAT_NAME,
            source=part.log.path,
            renderer=_RENDERER,
            nodes=conversation.nodes,
            project=envelope.cwd,
            version=envelope.version,
            agent=part.meta.agentType,
        )
        if conversation.snapshot is not None:
            trace.shape = snapshot(conversation.snapshot)
        if agent_id is not None:
            trace.parent = self._parent(part)
            own = _OWN.fullmatch(agent_id)
            trace.role = own[1] if own else "warmup" if _prompt(part) == "Warmup" else "subagent"
        ledger = self._ledger
        requests = LedgerRequests(ledger, conversation.nodes) if ledger is not None else None
        for response in conversation.responses:
            if owned.get(response.key) is not part:
                continue
            turn = _turn(response, conversation)
            trace.turns.append(turn)
            if ledger is not None and requests is not None:
                self._use_ledger(turn, response, ledger, requests)
        if ledger is not None:
            trace.losses += ledger.losses
            ledger.losses.clear()
        return trace

    def _use_ledger(
        self, turn: TraceTurn, response: ClaudeResponse, ledger: RequestLedger, requests: LedgerRequests
    ) -> None:
        """Take a turn's context and shape from the request ledger, where it has them."""
        reference = next((line.requestRef for line in response.records if line.requestRef is not None), None)
        if reference is None:
            return
        turn.shape = ledger.shape(reference)
        end = requests.end_node(reference)
        if end is not None:
            turn.context, turn.fidelity, turn.notes = end, "ledger", ()

    def _index_agent_calls(self, part: SessionPart) -> None:
        """Note which tool calls of a part started agents, by the agent's id and by its prompt."""
        starts: set[str] = set()
        for record in part.records:
            content = record.message.content if record.message is not None else None
            if not isinstance(content, list):
                continue
            for block in content:
                if not isinstance(block, ClaudeBlock):
                    continue
                if block.name in _STARTERS and block.id is not None:
                    starts.add(block.id)
                    self._within.setdefault(block.id, part)
                    prompt = _read(_started, bytes(block.input), _TaskInput()).prompt
                    if prompt:
                        self._by_prompt.setdefault(prompt.strip(), []).append(block.id)
                elif block.tool_use_id is not None and block.tool_use_id in starts:
                    agent_id = _read(_outcome, bytes(record.toolUseResult), _TaskResult()).agentId
                    if agent_id:
                        self._by_agent.setdefault(agent_id, block.tool_use_id)

    def _parent(self, part: SessionPart) -> TraceParent:
        tool_use_id = part.meta.toolUseId or self._by_agent.get(part.agent_id or "")
        if tool_use_id is None:
            waiting = self._by_prompt.get(_prompt(part).strip(), [])
            # Agents with the same prompt are taken to have started in the order in which their logs begin.
            tool_use_id = waiting.pop(0) if len(waiting) > 1 else waiting[0] if waiting else None
        depth = part.meta.spawnDepth or self._depth(part, tool_use_id)
        return TraceParent(self.session_id, tool_use_id, depth)

    def _depth(self, part: SessionPart, tool_use_id: str | None) -> int:
        depth = 1
        seen = {id(part)}
        while tool_use_id is not None and (above := self._within.get(tool_use_id)) is not None:
            if id(above) in seen or above.agent_id is None:
                break
            seen.add(id(above))
            depth += 1
            tool_use_id = above.meta.toolUseId or self._by_agent.get(above.agent_id)
        return depth


def _turn(response: ClaudeResponse, conversation: ClaudeConversation) -> TraceTurn:
    notes = conversation.notes.get(response.node, ())
    body = response.records[-1].message
    return TraceTurn(
        message_id=response.key,
        context=conversation.nodes[response.node].parent,
        action=(response.node,),
        model=body.model if body is not None else None,
        timestamp=response.records[0].timestamp,
        branch="active" if response.key in conversation.active else "branch",
        fidelity="repaired" if notes else "exact",
        notes=notes,
    )


def _prompt(part: SessionPart) -> str:
    """The first prompt of an agent, "" where it has no text."""
    for record in part.records:
        if record.type == "user" and record.message is not None:
            content = record.message.content
            if isinstance(content, str):
                return content
            return next(
                (text(b.text) for b in content or () if isinstance(b, ClaudeBlock) and b.type == "text"), ""
            )
    return ""


def _read(decode: Any, data: bytes, default: Any) -> Any:
    try:
        return decode(data) if data else default
    except DECODE_ERRORS:
        return default
