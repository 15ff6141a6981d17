"""Claude Code's session logs: `projects/<directory>/<session>.jsonl` and the logs of subagents beside them."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePath

import msgspec
from msgspec import Struct

from understudy.ingest.claude_code.ledger import RequestLedger
from understudy.ingest.claude_code.records import DECODE_ERRORS, ClaudeLog, read_log, read_message_lines
from understudy.ingest.claude_code.session import (
    FORMAT_NAME,
    SYNTHETIC_MODEL,
    AgentMeta,
    ClaudeSession,
    SessionPart,
    split_by_agent,
)
from understudy.ingest.claude_code.tree import ClaudeResponse
from understudy.ingest.claude_code.walk import ClaudeConversation
from understudy.ingest.log_files import LogFile
from understudy.ingest.log_reader import garbage_collection_paused
from understudy.ingest.trace import Trace

HEAD = 1 << 16
_LEDGER_HEAD = 1 << 22  # bytes read for the first response where the ledger's system prompt and tools precede it
_LEDGER = b'"api-request'
MAX_CLUSTER_BYTES = 200 << 20
"""Bytes of sessions with a common beginning that are compared in memory; larger clusters are read one by one."""

_AGENT = re.compile(r"agent-(.+?)(\.meta\.json|\.jsonl)")
_LINE = re.compile(
    rb'"(?:parentUuid|isSidechain|leafUuid)":|'
    rb'"type": ?"(?:queue-operation|file-history-snapshot|api-request(?:-[a-z]+)?|permission-mode|last-prompt)"'
)
_FIRST = re.compile(rb'"message": ?\{(?:"(?:model|type|role)": ?"[^"]*", ?)*"id": ?"([^"]+)"')
_SESSION = re.compile(rb'"sessionId": ?"([^"\\]+)"')

_WITHIN = re.compile(r"([^/]+)/subagents(?:/|$)")

_meta = msgspec.json.Decoder(AgentMeta).decode


class _SessionFiles(Struct):
    """The files of one session: each with its directory and the agent's id, None for the session's own.

    `first` is the message id of the first response: sessions that were forked from one another share it.
    """

    session_id: str
    files: list[tuple[LogFile, str, str | None]] = []
    first: bytes | None = None

    def size(self) -> int:
        return sum(file.size for file, _, _ in self.files)


class ClaudeCodeFormat:
    """Logs of every version from 1.0 on. The files of one project must be read together."""

    name = FORMAT_NAME

    def detect(self, path: str, head: bytes) -> bool:
        """Whether a file is the log of a session or a subagent, or the `meta.json` beside a subagent's."""
        name = path.replace("\\", "/").rpartition("/")[2]
        if name.endswith(".meta.json"):
            return _AGENT.fullmatch(name) is not None
        if not name.removesuffix(".gz").endswith(".jsonl"):
            return False
        gemini = b'"projectHash":' in head.partition(b"\n")[0]
        return not gemini and b'"type":' in head and _LINE.search(head) is not None

    def group(self, path: str) -> str:
        """The project's directory."""
        if "subagents" not in path:
            return os.path.dirname(path)  # noqa: PTH120 (of very many paths)
        parts = PurePath(path).parts
        if "subagents" in parts[1:]:
            return str(PurePath(*parts[: parts.index("subagents", 1) - 1]))
        return str(PurePath(path).parent)

    def read(self, files: Sequence[LogFile]) -> Iterator[Trace]:
        """The traces of all sessions in the files: first a session, then its subagents. Raises OSError.

        A resumed or forked session repeats turns of another. Such a turn is in one trace only, that which has most
        of its records.
        """
        metas: dict[str, AgentMeta] = {}
        sessions: dict[str, _SessionFiles] = {}
        for file in sorted(files, key=lambda file: file.path):
            self._file(file, metas, sessions)
        assigned_before: set[str] = set()
        for cluster in _clusters(sessions.values()):
            with garbage_collection_paused():
                traces = _read(cluster, metas, assigned_before)
            yield from traces

    def _file(self, file: LogFile, metas: dict[str, AgentMeta], sessions: dict[str, _SessionFiles]) -> None:
        directory, _, name = file.path.replace("\\", "/").rpartition("/")
        name = name.removesuffix(".gz")
        agent = _AGENT.fullmatch(name)
        agent_id = agent[1] if agent is not None else None
        if agent is not None and agent[2] == ".meta.json":
            with file.open() as stream:
                data = stream.read(HEAD)
            try:
                metas[f"{directory}/{agent_id}"] = _meta(data)
            except DECODE_ERRORS:
                return
            return
        with file.open() as stream:
            head = stream.read(HEAD)
            if agent is None and _LEDGER in head and _FIRST.search(head) is None:
                head += stream.read(_LEDGER_HEAD)
        within = _WITHIN.search(directory)
        if agent is None:
            session_id = name.removesuffix(".jsonl")
        elif within is not None:
            session_id = within[1]
        else:
            session = _SESSION.search(head)
            session_id = session[1].decode(errors="replace") if session else name.removesuffix(".jsonl")
        session_files = sessions.setdefault(session_id, _SessionFiles(session_id))
        session_files.files.append((file, directory, agent_id))
        if agent is None and (first := _FIRST.search(head)) is not None:
            session_files.first = first[1]


def _clusters(sessions: Iterable[_SessionFiles]) -> Iterator[list[_SessionFiles]]:
    """Sessions that begin with the same response together, unless they are too large."""
    same: dict[bytes | int, list[_SessionFiles]] = {}
    for session in sessions:
        same.setdefault(session.first or id(session), []).append(session)
    for cluster in same.values():
        if sum(session.size() for session in cluster) <= MAX_CLUSTER_BYTES:
            yield cluster
        else:
            yield from ([session] for session in cluster)


def _read(cluster: Sequence[_SessionFiles], metas: dict[str, AgentMeta], assigned_before: set[str]) -> list[Trace]:
    files: list[list[SessionPart]] = []
    read: list[tuple[LogFile, ClaudeLog]] = []
    for session in cluster:
        parts: list[SessionPart] = []
        for file, directory, agent_id in sorted(session.files, key=lambda one: (one[2] is not None, one[0].path)):
            meta = metas.get(f"{directory}/{agent_id}", AgentMeta())
            log = read_log(file)
            read.append((file, log))
            parts += split_by_agent(log, agent_id, meta)
        files.append(parts)
    ledger = None
    if any(log.ledger for _, log in read):
        # One for all of them: a fork has the turns from before it, but not their requests.
        ledger = RequestLedger(line for _, log in read for line in log.ledger)
        for file, _ in read:
            ledger.add_logged_messages(read_message_lines(file))
    sessions = [
        ClaudeSession(session.session_id, parts, ledger) for session, parts in zip(cluster, files, strict=True)
    ]
    owned, turns = _assign_turns(sessions, assigned_before)
    assigned_before.update(owned)
    return [trace for session in sessions for trace in session.traces(owned, turns)]


def _assign_turns(
    sessions: Sequence[ClaudeSession], assigned_before: set[str]
) -> tuple[dict[str, SessionPart], Counter[int]]:
    """The part that each turn belongs to, and how many turns of a part (by its `id`) belong to others."""
    best: dict[str, tuple[object, ...]] = {}
    owned: dict[str, SessionPart] = {}
    copied: Counter[int] = Counter()
    single_part = len(sessions) == 1 and len(sessions[0].parts) == 1
    for at, session in enumerate(sessions):
        for part in session.parts:
            copy = bool(bytes(part.log.envelope.forkedFrom))
            weights = _weights(part.built()) if len(sessions) > 1 else []
            for response in part.built().responses:
                key, first = response.key, response.records[0]
                if first.message is not None and first.message.model == SYNTHETIC_MODEL:
                    continue
                if key in assigned_before:
                    copied[id(part)] += 1
                    continue
                if single_part:
                    owned[key] = part
                    continue
                # The best copy has the most records of the response, is not a subagent's, and has the longest
                # history: a fork may hold less of it than the file that it was copied from.
                held = weights[response.node] if weights else 0
                rank = (-len(response.records), part.agent_id is not None, -held, copy, first.timestamp or "", at)
                if key not in owned or rank < best[key]:
                    if key in owned:
                        copied[id(owned[key])] += 1
                    best[key], owned[key] = rank, part
                else:
                    copied[id(part)] += 1
    return owned, copied


def _weights(conversation: ClaudeConversation) -> list[int]:
    """How many records there are on the path to each node."""
    weights: list[int] = []
    for node in conversation.nodes:
        before = weights[node.parent] if node.parent >= 0 else 0
        weights.append(before + (len(node.body.records) if isinstance(node.body, ClaudeResponse) else 1))
    return weights
