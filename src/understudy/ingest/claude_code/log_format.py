"""Reads Claude Code's session logs: `projects/<directory>/<session>.jsonl`, and the logs of subagents beside them.

A session gives one trace for its main conversation, and one for each subagent that it started.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import PurePath
from typing import BinaryIO

import msgspec
from msgspec import Struct

from understudy.ingest.claude_code.ledger import LedgerRequests, RequestLedger, snapshot
from understudy.ingest.claude_code.records import (
    DECODE_ERRORS,
    ClaudeBlock,
    ClaudeLog,
    ClaudeMessage,
    ClaudeRecord,
    decode_envelopes,
    read_log,
    read_message_lines,
    whole_lines,
)
from understudy.ingest.claude_code.render import ClaudeCodeRenderer, text, value_of
from understudy.ingest.claude_code.shortened import COMPACTION_NOT_LOGGED
from understudy.ingest.claude_code.subagent_lists import with_lists
from understudy.ingest.claude_code.tree import ClaudeConversation, ClaudeResponse, result_ids
from understudy.ingest.claude_code.versions import behaviour_of
from understudy.ingest.claude_code.walk import build_conversation
from understudy.ingest.formats.base import LogFormat
from understudy.ingest.json_values import string, value_at
from understudy.ingest.log_files import LogFile
from understudy.ingest.log_reader import garbage_collection_paused
from understudy.ingest.trace import Trace, TraceParent, TraceTurn

FORMAT_NAME = "claude-code"
SYNTHETIC_MODEL = "<synthetic>"
"""The model name in messages that the CLI itself writes in the assistant's name."""

_RENDERER = ClaudeCodeRenderer()
# ids of agents that the CLI starts for its own purposes, such as `acompact-1a2b`
_PROGRAM_AGENT = re.compile(r"a([a-z][a-z_]+)-[0-9a-f]+")
_STARTERS = ("Task", "Agent")
_WARMUP = "Warmup"
"""The prompt of agents that older versions start for themselves, so that the provider caches the system prompt."""
_PROMPT_ID = "prompt-of-"


class AgentMeta(Struct, frozen=True):
    """The contents of `agent-<id>.meta.json`, a file beside a subagent's log."""

    agentType: str | None = None
    toolUseId: str | None = None
    spawnDepth: int | None = None


class SessionPart(Struct):
    """The records of one agent in a session, and the conversation that is built from them on first use."""

    log: ClaudeLog
    records: Sequence[ClaudeRecord]
    agent_id: str | None = None
    meta: AgentMeta = AgentMeta()
    conversation: ClaudeConversation | None = None
    logs_attachments: bool = False

    def built(self) -> ClaudeConversation:
        """Return the conversation, and build it on the first call."""
        if self.conversation is None:
            records = self.log.records
            starts = [records[end] for end in self.log.ends if 0 < end < len(records)]
            # A new session never begins with a response or a tool result, so such a record was only written late.
            resumed = {record.uuid for record in starts if record.type != "assistant" and not result_ids(record)}
            self.conversation = build_conversation(
                self.records,
                behaviour_of(self.log.envelope.version),
                resumed,
                logs_attachments=self.logs_attachments,
            )
        return self.conversation


def split_by_agent(log: ClaudeLog, agent_id: str | None, meta: AgentMeta) -> list[SessionPart]:
    """Split the records of a file by agent. Returns the main agent first.

    Older versions write the records of subagents (`isSidechain`) into the session's own file without naming the
    agent, so every chain of records that starts at a new root is treated as one agent.
    """
    if agent_id is not None or not log.sidechains:
        return [SessionPart(log, log.records, agent_id, meta)]
    main: list[ClaudeRecord] = []
    by_root: dict[str, list[ClaudeRecord]] = {}
    root_of: dict[str | None, str] = {}
    root = ""
    for record in log.records:
        if not record.isSidechain:
            main.append(record)
            continue
        root = root_of.get(record.parentUuid, root if record.parentUuid and root else record.uuid or "")
        root_of[record.uuid] = root
        by_root.setdefault(root, []).append(record)
    return [SessionPart(log, main), *(SessionPart(log, records, uuid) for uuid, records in by_root.items())]


class ClaudeSession:
    """The agents of one session, and which tool call started each of them."""

    def __init__(
        self,
        session_id: str,
        parts: Sequence[SessionPart],
        ledger: RequestLedger | None = None,
        file_names: Collection[str] = (),
    ) -> None:
        self.session_id = session_id
        self.file_names = sorted(file_names)
        self.parts = parts
        self._ledger = ledger
        self._call_of_agent: dict[str, str] = {}
        self._calls_by_prompt: dict[str, list[str]] = {}
        self._part_of_call: dict[str, SessionPart] = {}
        self._prompt_of: dict[str, str] = {}  # id of the tool call that started an agent → its prompt

    def traces(self, owned: dict[str, SessionPart], copied: Counter[int]) -> Iterator[Trace]:
        """Yield one trace for each agent, with the turns that `owned` (by message id) assigns to it.

        `copied` maps the `id()` of a part to the number of its turns that were assigned to other parts.
        """
        if len(self.parts) > 1:
            for part in self.parts:
                self._index_agent_calls(part)
            for part in self.parts:
                self._add_prompt(part)
                if part.agent_id is not None and part.meta.agentType is not None:
                    records = with_lists(part.records, part.meta.agentType, self.parts[0].records)
                    if records is not part.records:
                        part.records, part.conversation = records, None
        counted_logs: set[int] = set()
        for part in self.parts:
            trace = self._trace(part, owned)
            trace.losses += part.built().losses
            if id(part.log) not in counted_logs:
                counted_logs.add(id(part.log))
                trace.losses += part.log.losses
            if copied[id(part)]:
                trace.losses["copied-turn"] += copied[id(part)]
            yield trace

    def _trace(self, part: SessionPart, owned: dict[str, SessionPart]) -> Trace:
        conversation, envelope = part.built(), part.log.envelope
        agent_id = part.agent_id
        trace = Trace(
            trace_id=_trace_id(self.session_id, agent_id),
            former_ids=tuple(_trace_id(name, agent_id) for name in self.file_names),
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
            purpose = _PROGRAM_AGENT.fullmatch(agent_id)
            trace.role = purpose[1] if purpose else "warmup" if _prompt(part) == _WARMUP else "subagent"
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
        """Take a turn's context, system prompt and tools from the request ledger if it has them."""
        reference = next((line.requestRef for line in response.records if line.requestRef is not None), None)
        if reference is None:
            return
        turn.shape = ledger.shape(reference)
        end = requests.end_node(reference)
        if end is not None:
            turn.context, turn.fidelity, turn.notes = end, "ledger", ()

    def _index_agent_calls(self, part: SessionPart) -> None:
        """Record which tool calls of a part started agents, by agent id and by prompt."""
        starter_ids: set[str] = set()
        for record in part.records:
            content = record.message.content if record.message is not None else None
            if not isinstance(content, list):
                continue
            for block in content:
                if not isinstance(block, ClaudeBlock):
                    continue
                if block.name in _STARTERS and block.id is not None:
                    starter_ids.add(block.id)
                    self._part_of_call.setdefault(block.id, part)
                    if prompt := string(value_at(value_of(block.input), "prompt")):
                        self._calls_by_prompt.setdefault(prompt.strip(), []).append(block.id)
                        self._prompt_of[block.id] = prompt
                elif block.tool_use_id is not None and block.tool_use_id in starter_ids:
                    agent_id = string(value_at(value_of(record.toolUseResult), "agentId"))
                    if agent_id is not None:
                        self._call_of_agent.setdefault(agent_id, block.tool_use_id)

    def _add_prompt(self, part: SessionPart) -> None:
        """Insert an agent's prompt, taken from the call that started it, if the agent's own log lacks it."""
        if part.agent_id is None or not part.records or part.records[0].type != "assistant":
            return
        call_id = part.meta.toolUseId or self._call_of_agent.get(part.agent_id)
        first_record = part.records[0]
        # An agent that no tool call started, and that called no tools itself, is a warm-up by the CLI.
        is_warmup = call_id is None and all(record.type == "assistant" for record in part.records)
        prompt = _WARMUP if is_warmup else self._prompt_of.get(call_id or "")
        if prompt is None or first_record.parentUuid is not None:
            return
        message = ClaudeMessage(content=prompt)
        first_record.parentUuid = f"{_PROMPT_ID}{part.agent_id}"
        added = ClaudeRecord(type="user", uuid=first_record.parentUuid, isSidechain=True, message=message)
        part.records = [added, *part.records]
        part.conversation = None

    def _parent(self, part: SessionPart) -> TraceParent:
        tool_use_id = part.meta.toolUseId or self._call_of_agent.get(part.agent_id or "")
        if tool_use_id is None:
            call_ids = self._calls_by_prompt.get(_prompt(part).strip(), [])
            # Several agents can have the same prompt: assume that they started in the order in which their logs
            # begin.
            tool_use_id = call_ids.pop(0) if len(call_ids) > 1 else call_ids[0] if call_ids else None
        depth = part.meta.spawnDepth or self._depth(part, tool_use_id)
        return TraceParent(self.session_id, tool_use_id, depth)

    def _depth(self, part: SessionPart, tool_use_id: str | None) -> int:
        depth = 1
        visited = {id(part)}
        while tool_use_id is not None and (starter := self._part_of_call.get(tool_use_id)) is not None:
            if id(starter) in visited or starter.agent_id is None:
                break
            visited.add(id(starter))
            depth += 1
            tool_use_id = starter.meta.toolUseId or self._call_of_agent.get(starter.agent_id)
        return depth


def _trace_id(session_id: str, agent_id: str | None) -> str:
    return session_id if agent_id is None else f"{session_id}/{agent_id}"


def _turn(response: ClaudeResponse, conversation: ClaudeConversation) -> TraceTurn:
    notes = conversation.notes.get(response.node, ())
    root = conversation.nodes[0].body
    if response.records[0].isSidechain and (root is conversation.responses[0] or _is_assumed(root)):
        notes = (*notes, "prompt_not_logged")
    message = response.records[-1].message
    return TraceTurn(
        message_id=response.key,
        context=conversation.nodes[response.node].parent,
        action=(response.node,),
        model=message.model if message is not None else None,
        timestamp=response.records[0].timestamp,
        branch="active" if response.key in conversation.active else "branch",
        fidelity="lossy" if COMPACTION_NOT_LOGGED in notes else "repaired" if notes else "exact",
        notes=notes,
    )


def _is_assumed(body: object) -> bool:
    """Return whether a node is the warm-up prompt that `_add_prompt` inserted, which no record holds."""
    if not isinstance(body, ClaudeRecord) or body.message is None or not (body.uuid or "").startswith(_PROMPT_ID):
        return False
    return body.message.content == _WARMUP


def _prompt(part: SessionPart) -> str:
    """Return the text of an agent's first prompt, "" if it has none."""
    for record in part.records:
        if record.type == "user" and record.message is not None:
            content = record.message.content
            if isinstance(content, str):
                return content
            blocks = (block for block in content or () if isinstance(block, ClaudeBlock))
            return next((text(block.text) for block in blocks if block.type == "text"), "")
    return ""


HEAD = 1 << 16
# bytes to search for the first response: the ledger may log a long system prompt and tools before it
_LEDGER_HEAD = 1 << 22
_LEDGER = b'"api-request'
MAX_CLUSTER_BYTES = 200 << 20
"""Sessions with a common beginning are compared in memory up to this many bytes; larger clusters are read one by
one.
"""

_AGENT = re.compile(r"agent-(.+?)(\.meta\.json|\.jsonl)")
_RECORD_MARK = re.compile(
    rb'"(?:parentUuid|isSidechain|leafUuid)":|'
    rb'"type": ?"(?:queue-operation|file-history-snapshot|api-request(?:-[a-z]+)?|permission-mode|last-prompt)"'
)
_RESPONSE_ID = re.compile(rb'"message": ?\{(?:"(?:model|type|role)": ?"[^"]*", ?)*"id": ?"([^"]+)"')
_TIMESTAMP = re.compile(rb'"timestamp": ?"([^"\\]+)"')
_SESSION_ID = re.compile(rb'"sessionId": ?"([^"\\]+)"')

_SESSION_DIRECTORY = re.compile(r"([^/]+)/subagents(?:/|$)")

_decode_meta = msgspec.json.Decoder(AgentMeta).decode


class _SessionFiles(Struct):
    """The files of one session, each with its directory and its agent id (None for the session's own log).

    `response_id` is the message id of the first response; a fork has the same one as the session it was made from,
    unless it begins with a compaction. `started_at` is the earliest timestamp. `file_names` are the names of files
    (or agents' directories) that differ from the session id.
    """

    session_id: str
    files: list[tuple[LogFile, str, str | None]] = []
    response_id: bytes | None = None
    started_at: bytes = b""
    file_names: set[str] = set()

    def size(self) -> int:
        return sum(file.size for file, _, _ in self.files)


class ClaudeCodeFormat(LogFormat):
    """Reads logs of every version from 1.0 on. All files of one project must be read together."""

    name = FORMAT_NAME

    def detect(self, path: str, head: bytes) -> bool:
        """Return whether a file is the log of a session or a subagent, or a subagent's `.meta.json`."""
        name = path.replace("\\", "/").rpartition("/")[2]
        if name.endswith(".meta.json"):
            return _AGENT.fullmatch(name) is not None
        if not name.removesuffix(".gz").endswith(".jsonl"):
            return False
        gemini = b'"projectHash":' in head.partition(b"\n")[0]
        return not gemini and b'"type":' in head and _RECORD_MARK.search(head) is not None

    def group(self, path: str) -> str:
        """Return the project's directory."""
        if "subagents" not in path:
            return os.path.dirname(path)  # noqa: PTH120 (of very many paths)
        parts = PurePath(path).parts
        if "subagents" in parts[1:]:
            return str(PurePath(*parts[: parts.index("subagents", 1) - 1]))
        return str(PurePath(path).parent)

    def links(self, path: str, head: bytes) -> Iterable[str]:
        """Return the session ids in the records and the message id of the first response, which forks share.

        Returns nothing for a file named after its session: it lies in its project's directory, so `group`
        suffices.
        """
        ids = {session_id.decode(errors="replace") for session_id in _SESSION_ID.findall(head)}
        name = path.replace("\\", "/").rpartition("/")[2].removesuffix(".gz").removesuffix(".jsonl")
        if name in ids or _AGENT.fullmatch(f"{name}.jsonl") is not None:
            return ()
        response_match = _RESPONSE_ID.search(head)
        return (*ids, *([response_match[1].decode(errors="replace")] if response_match is not None else ()))

    def read(self, files: Sequence[LogFile]) -> Iterator[Trace]:
        """Yield the traces of all sessions in the files: each session followed by its subagents. Raises OSError.

        A resumed or forked session repeats turns of another one. Each such turn is put into one trace only: the
        one that has most of its records.
        """
        metas: dict[str, AgentMeta] = {}
        sessions: dict[str, _SessionFiles] = {}
        for file in sorted(files, key=lambda file: file.path):
            self._add_file(file, metas, sessions)
        assigned_before: set[str] = set()
        # Process sessions by start time, so that turns which a fork copied stay with the original session.
        for cluster in _clusters(sorted(sessions.values(), key=lambda session: session.started_at)):
            with garbage_collection_paused():
                traces = _read_cluster(cluster, metas, assigned_before)
            yield from traces

    def _add_file(self, file: LogFile, metas: dict[str, AgentMeta], sessions: dict[str, _SessionFiles]) -> None:
        directory, _, name = file.path.replace("\\", "/").rpartition("/")
        name = name.removesuffix(".gz")
        agent = _AGENT.fullmatch(name)
        agent_id = agent[1] if agent is not None else None
        if agent is not None and agent[2] == ".meta.json":
            with file.open() as stream:
                data = stream.read(HEAD)
            with suppress(*DECODE_ERRORS):
                metas[f"{directory}/{agent_id}"] = _decode_meta(data)
            return
        with file.open() as stream:
            head = stream.read(HEAD)
            if agent is None and _LEDGER in head and _RESPONSE_ID.search(head) is None:
                head += stream.read(_LEDGER_HEAD)
            owner = _SESSION_DIRECTORY.search(directory)
            name = owner[1] if agent is not None and owner is not None else name.removesuffix(".jsonl")
            session_id = _session_of(file, name, head, stream)
        session = sessions.setdefault(session_id, _SessionFiles(session_id))
        session.files.append((file, directory, agent_id))
        if session_id != name:
            session.file_names.add(name)
        if agent is None and session.response_id is None and (response := _RESPONSE_ID.search(head)) is not None:
            session.response_id = response[1]
        if agent is None and (timestamp := _TIMESTAMP.search(head)) is not None:
            session.started_at = min(session.started_at or timestamp[1], timestamp[1])


def _session_of(file: LogFile, name: str, head: bytes, stream: BinaryIO) -> str:
    """Return the id of the session that a file logs; `name` is the id that its path suggests. `head` is what was
    read of the file, `stream` continues after it.

    The CLI names a log after its session. A file with any other name was renamed or collected, so the records
    decide. The last record counts, since a file may begin with records copied from the session that it continues.
    """
    name_bytes = name.encode(errors="replace")
    if name_bytes in head and name_bytes in _SESSION_ID.findall(head):
        return name
    chunk = b""
    for chunk in whole_lines(stream, Counter(), head):
        if name_bytes in chunk and any(envelope.sessionId == name for envelope in decode_envelopes(chunk)):
            return name
    session_id = _last_session(chunk)
    if session_id is None:
        # Hardly any log ends with so many lines without an id.
        with file.open() as reopened:
            for chunk in whole_lines(reopened, Counter()):
                session_id = _last_session(chunk) or session_id
    return session_id or name


def _last_session(chunk: bytes) -> str | None:
    """Return the session id of the last record that has one, or None; only few lines have to be decoded for it."""
    ids = (envelope.sessionId for envelope in decode_envelopes(chunk, backwards=True) if envelope.uuid is not None)
    return next(filter(None, ids), None)


def _merged_log(logs: Sequence[ClaudeLog]) -> ClaudeLog:
    """Merge several files of one agent: copies of its log made at different times, or parts of it.

    A record that only one file has is inserted after its predecessor in that file. A part without a common record
    is inserted by its timestamp.
    """
    logs = sorted(logs, key=lambda log: -len(log.records))
    merged = logs[0]
    for log in logs[1:]:
        uuids = {record.uuid for record in merged.records}
        # uuid of the preceding record in the same file → the records that follow it
        following: dict[str | None, list[ClaudeRecord]] = {}
        anchor_uuid: str | None = None
        for record in log.records:
            if record.uuid in uuids:
                anchor_uuid = record.uuid
            else:
                following.setdefault(anchor_uuid, []).append(record)
        unanchored = following.pop(None, [])
        begin = unanchored[0].timestamp or "" if unanchored else ""
        times = (record.timestamp or "" for record in merged.records)
        position = next((index for index, time in enumerate(times) if time > begin), len(merged.records))
        records: list[ClaudeRecord] = []
        new_positions: list[int] = []
        for index, record in enumerate(merged.records):
            if index == position:
                records += unanchored
            new_positions.append(len(records))
            records += [record, *following.get(record.uuid, ())]
        merged.ends = [new_positions[end] if end < len(new_positions) else len(records) for end in merged.ends]
        merged.records = records if position < len(new_positions) else [*records, *unanchored]
        merged.ledger = list(dict.fromkeys([*merged.ledger, *log.ledger]))
        merged.losses["copied-file"] += 1
        merged.sidechains = merged.sidechains or log.sidechains
        merged.attachments = merged.attachments or log.attachments
    return merged


def _clusters(sessions: Iterable[_SessionFiles]) -> Iterator[list[_SessionFiles]]:
    """Group sessions that begin with the same response.

    A group above `MAX_CLUSTER_BYTES` is split into single sessions.
    """
    by_first_response: dict[bytes | int, list[_SessionFiles]] = {}
    for session in sessions:
        by_first_response.setdefault(session.response_id or id(session), []).append(session)
    for cluster in by_first_response.values():
        if sum(session.size() for session in cluster) <= MAX_CLUSTER_BYTES:
            yield cluster
        else:
            yield from ([session] for session in cluster)


def _read_cluster(
    cluster: Sequence[_SessionFiles], metas: dict[str, AgentMeta], assigned_before: set[str]
) -> list[Trace]:
    parts_of_sessions: list[list[SessionPart]] = []
    logs_read: list[tuple[LogFile, ClaudeLog]] = []
    for session in cluster:
        parts: list[SessionPart] = []
        logs: dict[str | None, list[ClaudeLog]] = {}
        meta_by_agent: dict[str | None, AgentMeta] = {}
        files = sorted(session.files, key=lambda entry: (entry[2] is not None, entry[0].path))
        for file, directory, agent_id in files:
            log = read_log(file)
            logs_read.append((file, log))
            logs.setdefault(agent_id, []).append(log)
            if (meta := metas.get(f"{directory}/{agent_id}")) is not None:
                meta_by_agent[agent_id] = meta
        for agent_id, copies in logs.items():
            parts += split_by_agent(_merged_log(copies), agent_id, meta_by_agent.get(agent_id, AgentMeta()))
        if any(part.log.attachments for part in parts):
            for part in parts:
                part.logs_attachments = True
        parts_of_sessions.append(parts)
    ledger = None
    if any(log.ledger for _, log in logs_read):
        # One ledger for all sessions: a fork repeats earlier turns without their ledger entries.
        ledger = RequestLedger(line for _, log in logs_read for line in log.ledger)
        for file, _ in logs_read:
            ledger.add_logged_messages(read_message_lines(file))
    sessions = [
        ClaudeSession(session.session_id, parts, ledger, session.file_names)
        for session, parts in zip(cluster, parts_of_sessions, strict=True)
    ]
    owned, turns = _assign_turns(sessions, assigned_before)
    assigned_before.update(owned)
    return [trace for session in sessions for trace in session.traces(owned, turns)]


def _assign_turns(
    sessions: Sequence[ClaudeSession], assigned_before: set[str]
) -> tuple[dict[str, SessionPart], Counter[int]]:
    """Return the part that each turn belongs to (by message id), and how many turns of each part (by its `id()`)
    were assigned elsewhere.
    """
    best_rank: dict[str, tuple[object, ...]] = {}
    owned: dict[str, SessionPart] = {}
    copied: Counter[int] = Counter()
    single_part = len(sessions) == 1 and len(sessions[0].parts) == 1
    for number, session in enumerate(sessions):
        for part in session.parts:
            is_fork = bool(bytes(part.log.envelope.forkedFrom))
            weights = _weights(part.built()) if len(sessions) > 1 else []
            for response in part.built().responses:
                key, first_record = response.key, response.records[0]
                if first_record.message is not None and first_record.message.model == SYNTHETIC_MODEL:
                    continue
                if key in assigned_before:
                    copied[id(part)] += 1
                    continue
                if single_part:
                    owned[key] = part
                    continue
                # The best copy has the most records of the response, is not a subagent's, and has the longest
                # history (a fork may hold less history than the file it was copied from).
                weight = weights[response.node] if weights else 0
                rank = (
                    -len(response.records),
                    part.agent_id is not None,
                    -weight,
                    is_fork,
                    first_record.timestamp or "",
                    number,
                )
                if key not in owned or rank < best_rank[key]:
                    if key in owned:
                        copied[id(owned[key])] += 1
                    best_rank[key], owned[key] = rank, part
                else:
                    copied[id(part)] += 1
    return owned, copied


def _weights(conversation: ClaudeConversation) -> list[int]:
    """Return for each node how many records lie on its path from the root."""
    weights: list[int] = []
    for node in conversation.nodes:
        weight_above = weights[node.parent] if node.parent >= 0 else 0
        weights.append(weight_above + (len(node.body.records) if isinstance(node.body, ClaudeResponse) else 1))
    return weights
