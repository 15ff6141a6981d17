"""Solves a task by real tool calls, from changes that are known beforehand.

The work is a generator that yields actions and receives the texts of their results. For each request it runs
through the whole conversation again, so its state is entirely in the messages: a retried or resumed conversation
gets the same response.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import cached_property
from typing import Protocol

from msgspec import Struct

from understudy.model.protocol import ModelMessage, ModelTool
from understudy.model.scripted.changes import Apply, Change, Edit, Remove, Write
from understudy.model.scripted.toolsets import ActionCall, Toolset, patch_command, toolset_of


class ChatTurn(Struct, frozen=True, dict=True):
    """The input of a policy: the conversation so far, and the tools that it may call now."""

    messages: Sequence[ModelMessage]
    tools: Sequence[ModelTool] = ()
    seed: int | None = None

    @cached_property
    def toolset(self) -> Toolset:
        """Return the tools that may be called, as those of the agent that has them."""
        return toolset_of(self.tools)


class Action(Struct, frozen=True):
    """The output of a policy: `content`, followed by tool calls.

    `logprobs` has the natural logarithm of each completion token's probability; None means that all are 0.0.
    """

    content: str = ""
    tool_calls: tuple[ActionCall, ...] = ()
    reasoning: str | None = None
    logprobs: tuple[float, ...] | None = None


class Policy(Protocol):
    """Decides a turn. It has no state of its own: the same conversation gives the same action."""

    @property
    def name(self) -> str:
        """The name by which it is chosen."""
        ...

    def act(self, request: ChatTurn) -> Action:
        """Return the action for the last message of the conversation. Raises BackendError."""
        ...


_CONTEXT_LINES = 20
"""Lines read before and after those that change."""

_WORKDIR = re.compile(
    r"(?:\b(?:Primary w|W)orking directory: |working in the directory: |<cwd>\n?"
    r"|Workspace Directories:\*\*\n  - )(/[^\n<]*)"
)
_SUMMARY = re.compile(r"create a detailed summary of|TEXT ONLY")

Results = Sequence[str]
Work = Generator[Action, Results, bool]
Editing = Callable[[Edit, str, Toolset], Work]
"""Makes an edit in the file at a path with these tools."""


def next_action(
    turn: ChatTurn, start: int, changes: Sequence[Change], workdir: str, *, terse: bool = False
) -> Action:
    """Return the next action, after everything that happened since message `start`, which contains the task.

    `workdir` is the directory of the files if the conversation does not name it. With `terse` it reads whole
    files, changes as little text as possible, and says where: the line with the `def` or `class` before the
    change.
    """
    if wants_summary(turn.messages[-1]):
        return Action(f"The task is:\n\n{turn.messages[start].text}\n\nThe work on it goes on.")
    work = _make_changes(turn, changes, find_workdir(turn.messages) or workdir, _edit_tersely if terse else _edit)
    try:
        action = next(work)
        for results in tool_results(turn.messages[start + 1 :]):
            action = work.send(results)
    except StopIteration as end:
        success_text = "Done." if terse else "The change is made."
        text = success_text if end.value else "I could not make the change with the tools I have."
        return Action(text, turn.toolset.finish())
    return action


def wants_summary(message: ModelMessage) -> bool:
    """Return whether a message asks for a summary of the conversation, as agents do before they compact it."""
    return message.role == "user" and _SUMMARY.search(message.text) is not None


def find_workdir(messages: Iterable[ModelMessage]) -> str | None:
    """Return the working directory that the agent's own text names first, in system messages before others."""
    for message in sorted(messages, key=lambda message: message.role not in ("system", "developer")):
        if message.role in ("system", "developer", "user") and (match := _WORKDIR.search(message.text)):
            return match[1].rstrip()
    return None


def tool_results(messages: Iterable[ModelMessage]) -> list[Results]:
    """Return, for each assistant turn with tool calls, the texts of their results in order."""
    results: list[list[str]] = []
    for message in messages:
        if message.role == "assistant" and message.tool_calls:
            results.append([])
        elif message.role == "tool" and results:
            results[-1].append(message.text)
    return [texts for texts in results if texts]


def _make_changes(turn: ChatTurn, changes: Sequence[Change], workdir: str, edit: Editing) -> Work:
    """Yield the actions that make the changes: one by one with editing tools, the rest in the shell; the tools'
    results are sent in. Returns whether all changes were made.
    """
    tools = turn.toolset
    remaining = list(changes)
    while remaining and tools.can_edit:
        applied = yield from _apply_change(remaining[0], tools, workdir, edit)
        if not applied:
            if isinstance(remaining[0], Apply):
                return False
            break
        remaining.pop(0)
    if remaining and not tools.has_shell:
        return False
    if remaining:
        results = yield _patch_action(tools, remaining, "I apply the change as a patch.")
        if tools.failed(results[0]):
            return False
    if tools.has_shell:
        yield Action("Let me look at what changed.", (tools.run("git diff --stat", "Show what changed"),))
    return True


def _apply_change(change: Change, tools: Toolset, workdir: str, edit: Editing) -> Work:
    """Make one change with the tools that fit it; the result is False if that failed."""
    root = workdir.rstrip("/")
    match change:
        case Edit():
            return (yield from edit(change, f"{root}/{change.path}", tools))
        case Write() if tools.can_write():
            results = yield Action(
                f"I write `{change.path}`.", (tools.write(f"{root}/{change.path}", change.content),)
            )
            return not tools.failed(results[0])
        case Remove() if tools.has_shell:
            command = f"rm -f -- {shlex.quote(f'{root}/{change.path}')}"
            results = yield Action("This file goes.", (tools.run(command, "Remove the file"),))
            return not tools.failed(results[0])
        case Apply() if tools.has_shell:
            results = yield _patch_action(tools, [change], "This part I apply as a patch.")
            return not tools.failed(results[0])
        case _:
            return False


def _edit(edit: Edit, path: str, tools: Toolset) -> Work:
    size = edit.old.count("\n") + 1
    offset = max(1, edit.line - _CONTEXT_LINES)
    limit = edit.line - offset + size + _CONTEXT_LINES
    say = f"Let me read `{edit.path}` around line {edit.line}."
    results = yield Action(say, (tools.read(path, offset, limit),))
    window = tools.lines_read(results[0], offset)
    seen = "\n".join(window.values())
    if _is_applied(edit, window):
        return True
    width = next(
        (width for width in range(_CONTEXT_LINES + 1) if _is_unique(_replacement(edit, window, width), seen)),
        _CONTEXT_LINES,
    )
    # A tool that takes the first lines that fit is told of as many as there are.
    for attempt in dict.fromkeys((width, _CONTEXT_LINES) if tools.edits else (_CONTEXT_LINES,)):
        old, new = _replacement(edit, window, attempt)
        if not old or not new or any(line != line.rstrip() for line in new.split("\n")):
            return False
        results = yield Action("I change these lines.", (tools.edit(path, edit, old, new),))
        if not tools.failed(results[0]):
            return True
        if not tools.ambiguous(results[0]):
            return False
    return False


def _edit_tersely(edit: Edit, path: str, tools: Toolset) -> Work:
    """Read the whole file, then replace the changed lines, with as many lines around as make the text unique."""
    if edit.old.endswith("\n") != edit.new.endswith("\n"):
        return False  # the file's last newline comes or goes, which lines do not tell
    results = yield Action("", (tools.read(path),))
    window = tools.lines_read(results[0], 1)
    seen = "\n".join(window.values())
    if _is_applied(edit, window):
        return True
    lines = [(tag, text.rstrip("\r\n")) for tag, text in edit.lines]
    changed = [number for number, (tag, _) in enumerate(lines) if tag != " "]
    for width in range(len(lines)):
        changed_lines = lines[max(0, changed[0] - width) : changed[-1] + 1 + width]
        old, new = ("\n".join(text for tag, text in changed_lines if tag != other_tag) for other_tag in ("+", "-"))
        # Lines of a patch are whole.
        indent = min(len(text) - len(text.lstrip(" ")) for text in (old, new)) if tools.edits else 0
        if _is_unique((old[indent:], new[indent:]), seen):
            where = _definition(window, edit.line + changed[0])
            results = yield Action(where, (tools.edit(path, edit, old[indent:], new[indent:]),))
            return not tools.failed(results[0])
    return False


def _definition(window: dict[int, str], line: int) -> str:
    """Return the last line before `line` that begins a function or a class; "" if there is none."""
    before = (window[number].strip() for number in range(line - 1, 0, -1) if number in window)
    return next((text for text in before if text.startswith(("def ", "async def ", "class "))), "")


def _replacement(edit: Edit, window: dict[int, str], width: int) -> tuple[str, str]:
    """Return the text to replace and the new text, with `width` more lines of the window above and below."""
    old, new = _line_lists(edit)
    above = [window[line] for line in range(edit.line - width, edit.line) if line in window]
    end = edit.line + len(old)
    below = [window[line] for line in range(end, end + width) if line in window]
    return "\n".join(above + old + below), "\n".join(above + new + below)


def _line_lists(edit: Edit) -> tuple[list[str], list[str]]:
    """Return the lines before and after. A final newline of both is left out; that of only one is an empty last
    line.
    """
    old, new = (text.replace("\r\n", "\n") for text in (edit.old, edit.new))
    if all(text.endswith("\n") or not text for text in (old, new)):
        old_lines, new_lines = (text.removesuffix("\n").split("\n") if text else [] for text in (old, new))
        return old_lines, new_lines
    return old.split("\n"), new.split("\n")


def _is_applied(edit: Edit, window: dict[int, str]) -> bool:
    """Return whether the file already contains the change: it was made before the conversation was compacted."""
    old_lines, new_lines = _line_lists(edit)
    return _contains_lines(window, edit.line, new_lines) and not _contains_lines(window, edit.line, old_lines)


def _contains_lines(window: dict[int, str], start: int, lines: Sequence[str]) -> bool:
    return all(window.get(start + index) == line for index, line in enumerate(lines))


def _is_unique(replacement: tuple[str, str], seen: str) -> bool:
    old, new = replacement
    return bool(old.strip() and new.strip()) and -1 < seen.find(old) == seen.rfind(old)  # overlaps count too


def _patch_action(tools: Toolset, changes: Sequence[Change], say: str) -> Action:
    patch = "".join(change.patch if change.patch.endswith("\n") else change.patch + "\n" for change in changes)
    return Action(say, (tools.run(patch_command(patch), "Apply the patch"),))
