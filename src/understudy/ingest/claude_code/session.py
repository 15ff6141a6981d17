"""Traces of one session: its own conversation, and those of the subagents that it started."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from understudy.ingest.claude_code.ledger import Ledger, Requests, snapshot
from understudy.ingest.claude_code.records import FAULTS, Block, Lines, Record
from understudy.ingest.claude_code.render import ClaudeCodeRenderer, text
from understudy.ingest.claude_code.tree import Answer
from understudy.ingest.claude_code.versions import habits_of
from understudy.ingest.claude_code.walk import Conversation, converse
from understudy.ingest.trace import Trace, TraceParent, TraceTurn

NAME = "claude-code"
SYNTHETIC = "<synthetic>"
"""The model of what the CLI writes itself in the assistant's name."""

_RENDERER = ClaudeCodeRenderer()
_OWN = re.compile(r"a([a-z][a-z_]+)-[0-9a-f]+")  # agents that the CLI starts for itself are named by their use
_STARTERS = ("Task", "Agent")


class Meta(Struct, frozen=True):
    """What stands beside a subagent's log (`agent-<id>.meta.json`)."""

    agentType: str | None = None
    toolUseId: str | None = None
    spawnDepth: int | None = None


class Part(Struct):
    """One agent's records of a session, before and after they are made a conversation of."""

    lines: Lines
    records: Sequence[Record]
    agent_id: str | None = None
    meta: Meta = Meta()
    conversation: Conversation | None = None

    def done(self) -> Conversation:
        """The conversation, made when it is first asked for."""
        if self.conversation is None:
            records = self.lines.records
            resumed = {records[end].uuid for end in self.lines.ends if 0 < end < len(records)}
            self.conversation = converse(self.records, habits_of(self.lines.envelope.version), resumed)
        return self.conversation


class _Started(Struct):
    prompt: str | None = None


class _Outcome(Struct):
    agentId: str | None = None


_started = msgspec.json.Decoder(_Started).decode
_outcome = msgspec.json.Decoder(_Outcome).decode


def parts_of(lines: Lines, agent_id: str | None, meta: Meta) -> list[Part]:
    """The agents whose records are in a file: old versions write those of subagents among the session's own."""
    if agent_id is not None or not lines.sidechains:
        return [Part(lines, lines.records, agent_id, meta)]
    main: list[Record] = []
    asides: dict[str, list[Record]] = {}
    root: dict[str | None, str] = {}
    last = ""
    for record in lines.records:
        if not record.isSidechain:
            main.append(record)
            continue
        last = root.get(record.parentUuid, last if record.parentUuid and last else record.uuid or "")
        root[record.uuid] = last
        asides.setdefault(last, []).append(record)
    return [Part(lines, main), *(Part(lines, records, name) for name, records in asides.items())]


class Session:
    """The parts of a session, and how they hang together."""

    def __init__(self, session_id: str, parts: Sequence[Part], ledger: Ledger | None = None) -> None:
        self.session_id = session_id
        self.parts = parts
        self._ledger = ledger
        self._by_agent: dict[str, str] = {}
        self._by_prompt: dict[str, list[str]] = {}
        self._within: dict[str, Part] = {}

    def traces(self, owned: dict[str, Part], copied: Counter[int]) -> Iterator[Trace]:
        """A trace for each part, with the turns that are its own: `owned` says whose a message id is.

        `copied` has, by the id of a part, how many turns were left to others.
        """
        if len(self.parts) > 1:
            for part in self.parts:
                self._learn(part)
        told: set[int] = set()
        for part in self.parts:
            trace = self._trace(part, owned)
            trace.losses += part.done().losses
            if id(part.lines) not in told:
                told.add(id(part.lines))
                trace.losses += part.lines.losses
            if copied[id(part)]:
                trace.losses["copied-turn"] += copied[id(part)]
            yield trace

    def _trace(self, part: Part, owned: dict[str, Part]) -> Trace:
        conversation, envelope = part.done(), part.lines.envelope
        agent_id = part.agent_id
        trace = Trace(
            trace_id=self.session_id if agent_id is None else f"{self.session_id}/{agent_id}",
            session_id=self.session_id,
            format=NAME,
            source=part.lines.path,
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
        requests = Requests(ledger, conversation.nodes) if ledger is not None else None
        for answer in conversation.answers:
            if owned.get(answer.key) is not part:
                continue
            turn = _turn(answer, conversation)
            trace.turns.append(turn)
            if ledger is not None and requests is not None:
                self._recorded(turn, answer, ledger, requests)
        if ledger is not None:
            trace.losses += ledger.losses
            ledger.losses.clear()
        return trace

    def _recorded(self, turn: TraceTurn, answer: Answer, ledger: Ledger, requests: Requests) -> None:
        """Take what a turn was sent from the ledger, where it is there."""
        reference = next((line.requestRef for line in answer.lines if line.requestRef is not None), None)
        if reference is None:
            return
        turn.shape = ledger.shape(reference)
        end = requests.end(reference)
        if end is not None:
            turn.context, turn.fidelity, turn.notes = end, "ledger", ()

    def _learn(self, part: Part) -> None:
        """Which tool calls of a part started agents, by the agent's id and by its prompt."""
        starts: set[str] = set()
        for record in part.records:
            content = record.message.content if record.message is not None else None
            if not isinstance(content, list):
                continue
            for block in content:
                if not isinstance(block, Block):
                    continue
                if block.name in _STARTERS and block.id is not None:
                    starts.add(block.id)
                    self._within.setdefault(block.id, part)
                    prompt = _read(_started, bytes(block.input), _Started()).prompt
                    if prompt:
                        self._by_prompt.setdefault(prompt.strip(), []).append(block.id)
                elif block.tool_use_id is not None and block.tool_use_id in starts:
                    agent_id = _read(_outcome, bytes(record.toolUseResult), _Outcome()).agentId
                    if agent_id:
                        self._by_agent.setdefault(agent_id, block.tool_use_id)

    def _parent(self, part: Part) -> TraceParent:
        tool_use_id = part.meta.toolUseId or self._by_agent.get(part.agent_id or "")
        if tool_use_id is None:
            waiting = self._by_prompt.get(_prompt(part).strip(), [])
            # Agents with one prompt were started in the order in which their logs begin.
            tool_use_id = waiting.pop(0) if len(waiting) > 1 else waiting[0] if waiting else None
        depth = part.meta.spawnDepth or self._depth(part, tool_use_id)
        return TraceParent(self.session_id, tool_use_id, depth)

    def _depth(self, part: Part, tool_use_id: str | None) -> int:
        depth = 1
        seen = {id(part)}
        while tool_use_id is not None and (above := self._within.get(tool_use_id)) is not None:
            if id(above) in seen or above.agent_id is None:
                break
            seen.add(id(above))
            depth += 1
            tool_use_id = above.meta.toolUseId or self._by_agent.get(above.agent_id)
        return depth


def _turn(answer: Answer, conversation: Conversation) -> TraceTurn:
    notes = conversation.notes.get(answer.node, ())
    body = answer.lines[-1].message
    return TraceTurn(
        message_id=answer.key,
        context=conversation.nodes[answer.node].parent,
        action=(answer.node,),
        model=body.model if body is not None else None,
        timestamp=answer.lines[0].timestamp,
        branch="active" if answer.key in conversation.active else "branch",
        fidelity="repaired" if notes else "exact",
        notes=notes,
    )


def _prompt(part: Part) -> str:
    """What an agent was asked first, "" where that is not plain text."""
    for record in part.records:
        if record.type == "user" and record.message is not None:
            content = record.message.content
            if isinstance(content, str):
                return content
            return next((text(b.text) for b in content or () if isinstance(b, Block) and b.type == "text"), "")
    return ""


def _read(decode: Any, data: bytes, default: Any) -> Any:
    try:
        return decode(data) if data else default
    except FAULTS:
        return default
