"""What became of each turn, as far as its log tells: `annotate` sets the signals that states are chosen by."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct, field

from understudy.ingest.signals.calls import MARKED, Call, call_of, said_calls
from understudy.ingest.signals.edits import changes
from understudy.ingest.signals.feedback import corrected, feedback, stopped, unfinished
from understudy.ingest.signals.shell import ShellCommand
from understudy.ingest.signals.survival import CHANGING, Edit, Files, told
from understudy.ingest.signals.test_runs import ended
from understudy.ingest.trace import Message, Trace, TurnSignals, text_of

_UNATTENDED = frozenset(("mini-swe-agent", "swe-agent", "swe-smith", "swe-rebench", "parquet"))
"""Formats in which nobody but a program answers the model."""


def annotate(trace: Trace) -> None:
    """Sets the signals of every turn of a trace. Nothing that a log holds raises.

    All turns of the trace must be there: what came of one is told by those that follow.
    """
    heard = _heard(trace)
    results = _Results(heard)
    alone = trace.format in _UNATTENDED or trace.parent is not None or trace.role != "main"
    files = Files()
    made: list[list[_Done]] = []
    for turn, own in zip(trace.turns, heard, strict=True):
        own_files = files if turn.branch == "active" else None
        made.append([_done(call, own_files) for call in results.calls(own, trace.format)])
    # Only now it is known what became of the edits.
    for turn, own, done in zip(trace.turns, heard, made, strict=True):
        calls = [one.call for one in done]
        edits = [edit for one in done for edit in one.edits]
        turn.signals = TurnSignals(
            tool_calls=len(calls),
            tool_errors=sum(call.failed for call in calls),
            denied=sum(call.denied for call in calls),
            interrupted=own.stopped or any(call.interrupted for call in calls) or unfinished(own.words),
            tests=ended(calls),
            edits=len(edits),
            edits_survived=told(edits) if turn.branch == "active" else 0,
            commits=sum(one.commits for one in done),
            feedback=None if alone else _feedback(own, calls),
        )


class _Done(Struct):
    """A call with what it made."""

    call: Call
    edits: list[Edit]
    commits: int


class _Heard(Struct):
    """What belongs to a turn: its own `words` and raw `calls`, and the messages `after` it up to the next turn."""

    words: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    after: list[Message] = field(default_factory=list[Message])
    stopped: bool = False


def _heard(trace: Trace) -> list[_Heard]:
    heard = [_Heard() for _ in trace.turns]
    acting: dict[int, int] = {}
    bodies: dict[int, int] = {}
    for at, turn in enumerate(trace.turns):
        for index in turn.action:
            if 0 <= index < len(trace.nodes):
                acting.setdefault(index, at)
                bodies.setdefault(id(trace.nodes[index].body), at)
    history = trace.renderer.history
    # Whose each node is: the turn's that it is of or comes after, -1 before any.
    owner: dict[int, int] = {}
    for index in _downwards(trace):
        node = trace.nodes[index]
        at = acting.get(index)
        if at is None:
            copy = bodies.get(id(node.body))
            if copy is not None:
                owner[index] = copy
                continue
            at = owner.get(node.parent, -1)
            if at >= 0:
                owner[index] = _hear(heard[at], history(node.body), own=False, at=at)
            continue
        owner[index] = at
        _hear(heard[at], history(node.body), own=True, at=at)
    return heard


def _hear(heard: _Heard, messages: Sequence[Message], *, own: bool, at: int) -> int:
    """Adds what a node says to a turn; returns whose the nodes behind it are."""
    for message in messages:
        role = message.get("role")
        if role == "assistant":
            if not own:
                return -1  # somebody's answer that is no turn
            heard.calls += message.get("tool_calls") or ()
            words = text_of(message.get("content"))
            heard.words = f"{heard.words}\n{words}" if heard.words else words
        elif role in ("user", "tool"):
            heard.after.append(message)
            if role == "user" and stopped(text_of(message.get("content"))):
                heard.stopped = True
    return at


def _downwards(trace: Trace) -> Iterator[int]:
    """The nodes, each after its parent; those that have no beginning are left out."""
    nodes = trace.nodes
    if all(node.parent < index for index, node in enumerate(nodes)):
        yield from range(len(nodes))
        return
    below: dict[int, list[int]] = {}
    for index, node in enumerate(nodes):
        below.setdefault(node.parent, []).append(index)
    waiting = [index for parent, found in below.items() if not 0 <= parent < len(nodes) for index in found]
    for index in waiting:
        yield index
        waiting += below.get(index, ())


class _Results:
    """The results of calls: those behind a call's own turn, else those anywhere if no other call has its id."""

    def __init__(self, heard: Sequence[_Heard]) -> None:
        self._all: dict[str, Message] = {}
        self._asked = Counter(str(call.get("id")) for own in heard for call in own.calls)
        self._said = not self._asked
        for own in heard:
            for message in own.after:
                if message.get("role") == "tool":
                    self._all.setdefault(str(message.get("tool_call_id")), message)

    def calls(self, own: _Heard, format: str) -> list[Call]:
        """The calls of a turn, each with its result."""
        if self._said:
            return said_calls(format, own.words, own.after)
        near: dict[str, Message] = {}
        for message in own.after:
            if message.get("role") == "tool":
                near.setdefault(str(message.get("tool_call_id")), message)
        made: list[Call] = []
        for raw in own.calls:
            name = str(raw.get("id"))
            result = near.get(name) or (self._all.get(name) if self._asked[name] == 1 else None)
            made.append(call_of(raw, result, format in MARKED))
        return made


def _done(call: Call, files: Files | None) -> _Done:
    """What a call made; with `files` that is done to them."""
    edits: list[Edit] = []
    committed = commits(call)
    wanted = [] if call.denied or call.failed else changes(call)
    for change in wanted:
        if files is None or not call.done:
            # Without a result nobody knows whether it was made.
            edits.append(Edit(change.path, unknown=files is not None))
        else:
            edits.append(files.apply(change))
    if files is not None and not files.empty and call.text is not None and not call.denied and not wanted:
        if CHANGING.search(call.script):
            for command in call.shell():
                files.ran(command)
        if committed:
            files.commit()
    return _Done(call, edits, committed)


def _feedback(own: _Heard, calls: Sequence[Call]) -> Any:
    if any(call.denied and corrected(call.text or "") for call in calls):
        return "negative"
    for message in own.after:
        if message.get("role") == "user" and (found := feedback(text_of(message.get("content")))) is not None:
            return found
    return None


# What git says of a commit: "[main 1a2b3c4] Subject", "[main (root-commit) 1a2b3c4] Subject".
_MADE = re.compile(r"^\s{0,8}\[[^\]\n]{1,250}[ )][0-9a-f]{7,40}\] ", re.MULTILINE)
_NONE = ("nothing to commit", "no changes added to commit", "nothing added to commit", "Aborting commit")
_VALUED = frozenset(("-C", "-c", "--git-dir", "--work-tree", "--namespace"))
_IDLE = frozenset(("--dry-run", "-h", "--help"))
_QUIET = frozenset(("-q", "--quiet"))


def commits(call: Call) -> int:
    """How many commits a call made, as far as its result says so."""
    if not call.done:
        return 0
    if call.name.rpartition("__")[2] in ("git_commit", "create_commit"):
        return int(not call.failed)
    if "commit" not in call.script:
        return 0
    asked = [(at, command) for at, command in enumerate(call.shell()) if _commits(command)]
    if not asked:
        return 0
    text = call.text or ""
    said = len(_MADE.findall(text))
    if said:
        return min(said, len(asked))
    if call.code != 0 or any(sign in text for sign in _NONE):
        return 0
    return sum(_certain(call.shell(), at) for at, _ in asked)


def _commits(command: ShellCommand) -> bool:
    return command.program == "git" and _action(command) == "commit" and not _IDLE.intersection(command.words)


def _action(command: ShellCommand) -> str:
    words = iter(command.words[1:])
    for word in words:
        if word in _VALUED:
            next(words, None)
        elif not word.startswith("-"):
            return word
    return ""


def _certain(run: list[ShellCommand], at: int) -> bool:
    """Whether a commit that says nothing is known to have been made when all ended well."""
    quiet = any(word in _QUIET for word in run[at].words) or run[at].writes
    return bool(quiet) and all(command.ends == "&&" for command in run[at : len(run) - 1])
