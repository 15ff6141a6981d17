"""Claude Code's session logs: `projects/<directory>/<session>.jsonl` and the logs of subagents beside them."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePath

import msgspec
from msgspec import Struct

from understudy.ingest.claude_code.ledger import Ledger
from understudy.ingest.claude_code.records import FAULTS, Lines, read_lines, read_spoken
from understudy.ingest.claude_code.session import NAME, SYNTHETIC, Meta, Part, Session, parts_of
from understudy.ingest.claude_code.tree import Answer
from understudy.ingest.claude_code.walk import Conversation
from understudy.ingest.log_files import LogFile
from understudy.ingest.log_reader import garbage_collection_paused
from understudy.ingest.trace import Trace

HEAD = 1 << 16
_BEFORE = 1 << 22  # in which an answer comes, where the ledger has system prompts and tools before it
_LEDGER = b'"api-request'
TOGETHER = 200 << 20
"""Bytes of sessions with a common beginning that are looked at together; more are read one by one."""

_AGENT = re.compile(r"agent-(.+?)(\.meta\.json|\.jsonl)")
_LINE = re.compile(
    rb'"(?:parentUuid|isSidechain|leafUuid)":|'
    rb'"type": ?"(?:queue-operation|file-history-snapshot|api-request(?:-[a-z]+)?|permission-mode|last-prompt)"'
)
_FIRST = re.compile(rb'"message": ?\{(?:"(?:model|type|role)": ?"[^"]*", ?)*"id": ?"([^"]+)"')
_SESSION = re.compile(rb'"sessionId": ?"([^"\\]+)"')

_WITHIN = re.compile(r"([^/]+)/subagents(?:/|$)")

_meta = msgspec.json.Decoder(Meta).decode


class _Found(Struct):
    """The files of one session: each with its directory and the agent's id, None for the session's own.

    `first` is the id of the first answer.
    """

    session_id: str
    files: list[tuple[LogFile, str, str | None]] = []
    first: bytes | None = None

    def size(self) -> int:
        return sum(file.size for file, _, _ in self.files)


class ClaudeCode:
    """Logs of every version from 1.0 on. The files of one project are to be read together."""

    name = NAME

    def detect(self, path: str, head: bytes) -> bool:
        """Whether a file is a session's or a subagent's log, or the note beside a subagent's."""
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

        A turn that several files have, by a resume or a fork, is in the one trace that has most of its lines.
        """
        metas: dict[str, Meta] = {}
        sessions: dict[str, _Found] = {}
        for file in sorted(files, key=lambda file: file.path):
            self._sort(file, metas, sessions)
        taken: set[str] = set()
        for cluster in _clusters(sessions.values()):
            with garbage_collection_paused():
                traces = _read(cluster, metas, taken)
            yield from traces

    def _sort(self, file: LogFile, metas: dict[str, Meta], sessions: dict[str, _Found]) -> None:
        directory, _, name = file.path.replace("\\", "/").rpartition("/")
        name = name.removesuffix(".gz")
        agent = _AGENT.fullmatch(name)
        agent_id = agent[1] if agent is not None else None
        if agent is not None and agent[2] == ".meta.json":
            with file.open() as stream:
                data = stream.read(HEAD)
            try:
                metas[f"{directory}/{agent_id}"] = _meta(data)
            except FAULTS:
                return
            return
        with file.open() as stream:
            head = stream.read(HEAD)
            if agent is None and _LEDGER in head and _FIRST.search(head) is None:
                head += stream.read(_BEFORE)
        within = _WITHIN.search(directory)
        if agent is None:
            session_id = name.removesuffix(".jsonl")
        elif within is not None:
            session_id = within[1]
        else:
            session = _SESSION.search(head)
            session_id = session[1].decode(errors="replace") if session else name.removesuffix(".jsonl")
        found = sessions.setdefault(session_id, _Found(session_id))
        found.files.append((file, directory, agent_id))
        if agent is None and (first := _FIRST.search(head)) is not None:
            found.first = first[1]


def _clusters(sessions: Iterable[_Found]) -> Iterator[list[_Found]]:
    """Sessions that begin with the same answer together, as far as they are not too large."""
    same: dict[bytes | int, list[_Found]] = {}
    for found in sessions:
        same.setdefault(found.first or id(found), []).append(found)
    for cluster in same.values():
        if sum(found.size() for found in cluster) <= TOGETHER:
            yield cluster
        else:
            yield from ([found] for found in cluster)


def _read(cluster: Sequence[_Found], metas: dict[str, Meta], taken: set[str]) -> list[Trace]:
    files: list[list[Part]] = []
    read: list[tuple[LogFile, Lines]] = []
    for found in cluster:
        parts: list[Part] = []
        for file, directory, agent_id in sorted(found.files, key=lambda one: (one[2] is not None, one[0].path)):
            meta = metas.get(f"{directory}/{agent_id}", Meta())
            lines = read_lines(file)
            read.append((file, lines))
            parts += parts_of(lines, agent_id, meta)
        files.append(parts)
    ledger = None
    if any(lines.ledger for _, lines in read):
        # One for all of them: a fork has the turns from before it, but not their requests.
        ledger = Ledger(line for _, lines in read for line in lines.ledger)
        for file, _ in read:
            ledger.learn(read_spoken(file))
    sessions = [Session(found.session_id, parts, ledger) for found, parts in zip(cluster, files, strict=True)]
    owned, turns = _owned(sessions, taken)
    taken.update(owned)
    return [trace for session in sessions for trace in session.traces(owned, turns)]


def _owned(sessions: Sequence[Session], taken: set[str]) -> tuple[dict[str, Part], Counter[int]]:
    """Which part each turn belongs to, and how many turns of a part (by its `id`) belong to others."""
    best: dict[str, tuple[object, ...]] = {}
    owned: dict[str, Part] = {}
    left: Counter[int] = Counter()
    alone = len(sessions) == 1 and len(sessions[0].parts) == 1
    for at, session in enumerate(sessions):
        for part in session.parts:
            copy = bool(bytes(part.lines.envelope.forkedFrom))
            weights = _weights(part.done()) if len(sessions) > 1 else []
            for answer in part.done().answers:
                key, first = answer.key, answer.lines[0]
                if first.message is not None and first.message.model == SYNTHETIC:
                    continue
                if key in taken:
                    left[id(part)] += 1
                    continue
                if alone:
                    owned[key] = part
                    continue
                # A fork may hold less of what came before than the file it was copied from.
                held = weights[answer.node] if weights else 0
                rank = (-len(answer.lines), part.agent_id is not None, -held, copy, first.timestamp or "", at)
                if key not in owned or rank < best[key]:
                    if key in owned:
                        left[id(owned[key])] += 1
                    best[key], owned[key] = rank, part
                else:
                    left[id(part)] += 1
    return owned, left


def _weights(conversation: Conversation) -> list[int]:
    """How many records stand on the way to each node."""
    weights: list[int] = []
    for node in conversation.nodes:
        before = weights[node.parent] if node.parent >= 0 else 0
        weights.append(before + (len(node.body.lines) if isinstance(node.body, Answer) else 1))
    return weights
