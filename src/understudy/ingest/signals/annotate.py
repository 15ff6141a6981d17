"""Sets the signals of each turn, which states are selected by: what became of it, as far as the log shows."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from msgspec import Struct, field

from understudy.ingest.signals.calls import MARKS_ERRORS, LoggedCall, ShellCommand, call_of, calls_in_text
from understudy.ingest.signals.edits import CHANGING, FileTracker, TrackedEdit, count_survived, file_changes
from understudy.ingest.signals.feedback import (
    feedback,
    is_correction,
    is_cut_off,
    is_interrupt_note,
    queued_prompts,
)
from understudy.ingest.signals.test_runs import result_of_tests
from understudy.ingest.trace import Message, Trace, TurnSignals, text_of

_UNATTENDED = frozenset(("mini-swe-agent", "swe-agent", "swe-smith", "swe-rebench", "parquet"))
"""Formats of agents that run without a user, so that messages to the model are not feedback."""


def annotate(trace: Trace) -> None:
    """Set the signals of every turn of a trace. Malformed content never raises.

    The trace must be complete, because what became of a turn shows in later turns.
    """
    contexts = _turn_contexts(trace)
    results = _ResultIndex(contexts)
    is_unattended = trace.format in _UNATTENDED or trace.parent is not None or trace.role != "main"
    files = FileTracker()
    effects: list[list[_CallEffects]] = []
    for turn, context in zip(trace.turns, contexts, strict=True):
        tracked_files = files if turn.branch == "active" else None
        effects.append([_effects_of(call, tracked_files) for call in results.calls(context, trace.format)])
    # Whether an edit survived is known only now, after all later calls were applied.
    for turn, context, effects_of_turn in zip(trace.turns, contexts, effects, strict=True):
        calls = [effect.call for effect in effects_of_turn]
        edits = [edit for effect in effects_of_turn for edit in effect.edits]
        turn.signals = TurnSignals(
            tool_calls=len(calls),
            tool_errors=sum(call.failed for call in calls),
            denied=sum(call.denied for call in calls),
            interrupted=context.stopped or any(call.interrupted for call in calls) or is_cut_off(context.text),
            tests=result_of_tests(calls),
            edits=len(edits),
            edits_survived=count_survived(edits) if turn.branch == "active" else 0,
            commits=sum(effect.commits for effect in effects_of_turn),
            feedback=None if is_unattended else _feedback(context, calls),
        )


class _CallEffects(Struct):
    """A call with its edits, and the number of its commits."""

    call: LoggedCall
    edits: list[TrackedEdit]
    commits: int


class _TurnContext(Struct):
    """The messages of a turn: its `text` and raw `calls`, and the messages `after` it up to the next turn."""

    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    after: list[Message] = field(default_factory=list[Message])
    stopped: bool = False


def _turn_contexts(trace: Trace) -> list[_TurnContext]:
    contexts = [_TurnContext() for _ in trace.turns]
    acting: dict[int, int] = {}
    bodies: dict[int, int] = {}
    for turn_index, turn in enumerate(trace.turns):
        for index in turn.action:
            if 0 <= index < len(trace.nodes):
                acting.setdefault(index, turn_index)
                bodies.setdefault(id(trace.nodes[index].body), turn_index)
    history = trace.renderer.history
    # node index → the index of the turn that it belongs to or follows; -1 before the first turn
    owner: dict[int, int] = {}
    for index in _downwards(trace):
        node = trace.nodes[index]
        if (turn_index := acting.get(index)) is not None:
            owner[index] = turn_index
            _add_node(contexts[turn_index], history(node.body), is_action=True, turn_index=turn_index)
        elif (copied_from := bodies.get(id(node.body))) is not None:
            owner[index] = copied_from
        elif (turn_index := owner.get(node.parent, -1)) >= 0:
            owner[index] = _add_node(
                contexts[turn_index], history(node.body), is_action=False, turn_index=turn_index
            )
    return contexts


def _add_node(context: _TurnContext, messages: Sequence[Message], *, is_action: bool, turn_index: int) -> int:
    """Add a node's messages to a turn. Returns the turn that the nodes after it belong to, or -1 for none."""
    for message in messages:
        role = message.get("role")
        if role == "assistant":
            if not is_action:
                return -1  # a response that is not a turn of this trace
            context.calls += message.get("tool_calls") or ()
            text = text_of(message.get("content"))
            context.text = f"{context.text}\n{text}" if context.text else text
        elif role in ("user", "tool"):
            context.after.append(message)
            if role == "user" and is_interrupt_note(text_of(message.get("content"))):
                context.stopped = True
    return turn_index


def _downwards(trace: Trace) -> Iterator[int]:
    """Yield the indexes of the nodes, parents first. Nodes on a cycle, as hostile logs may have, are left out."""
    nodes = trace.nodes
    if all(node.parent < index for index, node in enumerate(nodes)):
        yield from range(len(nodes))
        return
    children_of: dict[int, list[int]] = {}
    for index, node in enumerate(nodes):
        children_of.setdefault(node.parent, []).append(index)
    pending = [
        index for parent, children in children_of.items() if not 0 <= parent < len(nodes) for index in children
    ]
    for index in pending:
        yield index
        pending += children_of.get(index, ())


class _ResultIndex:
    """Finds the results of calls: among the messages after the call's turn, else anywhere if the call's id is
    unique.
    """

    def __init__(self, contexts: Sequence[_TurnContext]) -> None:
        self._results_by_id = _results(message for context in contexts for message in context.after)
        self._call_counts = Counter(str(call.get("id")) for context in contexts for call in context.calls)
        self._calls_in_text = not self._call_counts

    def calls(self, context: _TurnContext, format: str) -> list[LoggedCall]:
        """Return the calls of a turn, each with its result."""
        if self._calls_in_text:
            return calls_in_text(format, context.text, context.after)
        results_after = _results(context.after)
        calls: list[LoggedCall] = []
        for raw in context.calls:
            call_id = str(raw.get("id"))
            result = results_after.get(call_id) or (
                self._results_by_id.get(call_id) if self._call_counts[call_id] == 1 else None
            )
            calls.append(call_of(raw, result, format in MARKS_ERRORS))
        return calls


def _results(messages: Iterable[Message]) -> dict[str, Message]:
    """Return the first result of each call, by call id."""
    results: dict[str, Message] = {}
    for message in messages:
        if message.get("role") == "tool":
            results.setdefault(str(message.get("tool_call_id")), message)
    return results


def _effects_of(call: LoggedCall, files: FileTracker | None) -> _CallEffects:
    """Return the edits and commits of a call, and apply them to `files` if it is given."""
    edits: list[TrackedEdit] = []
    commit_count = count_commits(call)
    changes = [] if call.denied or call.failed else file_changes(call)
    for change in changes:
        if files is None or not call.completed:
            # Without a result it is unknown whether the edit took place.
            edits.append(TrackedEdit(change.path, unknown=files is not None))
        else:
            edits.append(files.apply(change))
    if files is not None and not files.empty and call.text is not None and not call.denied and not changes:
        if CHANGING.search(call.script):
            for command in call.shell():
                files.run_command(command)
        if commit_count:
            files.commit()
    return _CallEffects(call, edits, commit_count)


def _feedback(context: _TurnContext, calls: Sequence[LoggedCall]) -> Any:
    if any(call.denied and is_correction(call.text or "") for call in calls):
        return "negative"
    for message in context.after:
        message_text = text_of(message.get("content"))
        for text in [message_text] if message.get("role") == "user" else queued_prompts(message_text):
            if (sign := feedback(text)) is not None:
                return sign
    return None


# The line that git prints for a commit: "[main 1a2b3c4] Subject", "[main (root-commit) 1a2b3c4] Subject".
_COMMIT_LINE = re.compile(r"^\s{0,8}\[[^\]\n]{1,250}[ )][0-9a-f]{7,40}\] ", re.MULTILINE)
_NOTHING_COMMITTED = (
    "nothing to commit",
    "no changes added to commit",
    "nothing added to commit",
    "Aborting commit",
)
_VALUED = frozenset(("-C", "-c", "--git-dir", "--work-tree", "--namespace"))
_IDLE = frozenset(("--dry-run", "-h", "--help"))
_QUIET = frozenset(("-q", "--quiet"))


def count_commits(call: LoggedCall) -> int:
    """Return how many git commits a call made, as far as its result shows."""
    if not call.completed:
        return 0
    if call.name.rpartition("__")[2] in ("git_commit", "create_commit"):
        return int(not call.failed)
    if "commit" not in call.script:
        return 0
    commit_commands = [(index, command) for index, command in enumerate(call.shell()) if _commits(command)]
    if not commit_commands:
        return 0
    text = call.text or ""
    reported = len(_COMMIT_LINE.findall(text))
    if reported:
        return min(reported, len(commit_commands))
    if call.code != 0 or any(sign in text for sign in _NOTHING_COMMITTED):
        return 0
    return sum(_must_have_succeeded(call.shell(), index) for index, _ in commit_commands)


def _commits(command: ShellCommand) -> bool:
    return command.program == "git" and _action(command) == "commit" and not _IDLE.intersection(command.argv)


def _action(command: ShellCommand) -> str:
    arguments = iter(command.argv[1:])
    for word in arguments:
        if word in _VALUED:
            next(arguments, None)
        elif not word.startswith("-"):
            return word
    return ""


def _must_have_succeeded(commands: list[ShellCommand], index: int) -> bool:
    """Return whether a commit without output must have succeeded, because the command line as a whole did."""
    is_quiet = any(word in _QUIET for word in commands[index].argv) or commands[index].writes
    return bool(is_quiet) and all(command.ends == "&&" for command in commands[index : len(commands) - 1])
