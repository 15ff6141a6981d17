"""Work on a task by real tool calls, from changes that are known beforehand.

The work is a generator that yields actions and is sent the texts of their results. For every request it runs again
through the whole conversation, so that all its state is in the messages: a retried or resumed conversation
gets the same answer.
"""

from __future__ import annotations

import base64
import json
import re
import shlex
import unicodedata
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Protocol

from msgspec import Struct

from understudy.model.protocol import ModelMessage, ModelTool
from understudy.model.scripted.changes import Apply, Change, Edit, Remove, Write


class ChatTurn(Struct, frozen=True):
    """What a policy is asked: the conversation so far, and the tools it may call now."""

    messages: Sequence[ModelMessage]
    tools: Sequence[ModelTool] = ()
    seed: int | None = None

    def offers(self, *names: str) -> bool:
        """Whether all these tools may be called."""
        return {tool.function.name for tool in self.tools}.issuperset(names)


class ActionCall(Struct, frozen=True):
    """A tool and the JSON text of its arguments."""

    name: str
    arguments: str


class Action(Struct, frozen=True):
    """What a policy does: says `content`, then calls tools.

    `logprobs` has the natural logarithm of each completion token's probability; None says that the policy was
    certain, which is 0.0 for each.
    """

    content: str = ""
    tool_calls: tuple[ActionCall, ...] = ()
    reasoning: str | None = None
    logprobs: tuple[float, ...] | None = None


class Policy(Protocol):
    """Decides a turn. It keeps no state of its own: the same conversation gives the same action."""

    @property
    def name(self) -> str:
        """The name it is chosen by."""
        ...

    def act(self, request: ChatTurn) -> Action:
        """The action for the last message of the conversation. Raises BackendError."""
        ...


_AROUND = 20
"""Lines read before and after those that change."""

_WORKDIR = re.compile(r"\b(?:Primary w|W)orking directory: (/[^\n]*)")
_NUMBERED = re.compile(r" *(\d+)(?:\t|→)(.*)")
_FAILURES = ("Error", "<tool_use_error>")
_SUMMARY = re.compile(r"create a detailed summary of|TEXT ONLY")

Results = Sequence[str]
Work = Generator[Action, Results, bool]
Editing = Callable[[Edit, str], Work]
"""Makes an edit in the file at a path."""


def next_action(
    turn: ChatTurn, start: int, changes: Sequence[Change], workdir: str, *, terse: bool = False
) -> Action:
    """The action after everything that happened since message `start`, which gave the task.

    `workdir` is where the files are when the conversation does not say it. `terse` reads whole files, changes as
    little text as it can, and says where: the line with the `def` or `class` before the change.
    """
    if wants_summary(turn.messages[-1]):
        return Action(f"The task is:\n\n{turn.messages[start].text}\n\nThe work on it goes on.")
    work = _work(turn, changes, find_workdir(turn.messages) or workdir, _edit_tersely if terse else _edit)
    try:
        action = next(work)
        for results in tool_results(turn.messages[start + 1 :]):
            action = work.send(results)
    except StopIteration as end:
        done = "Done." if terse else "The change is made."
        return Action(done if end.value else "I could not make the change with the tools I have.")
    return action


def wants_summary(message: ModelMessage) -> bool:
    """Whether the message asks for a summary of the conversation, as an agent does before it shortens it."""
    return message.role == "user" and _SUMMARY.search(message.text) is not None


def find_workdir(messages: Iterable[ModelMessage]) -> str | None:
    """The working directory that the agent's own text names: the first one, system messages before others."""
    for message in sorted(messages, key=lambda message: message.role not in ("system", "developer")):
        if message.role in ("system", "developer", "user") and (match := _WORKDIR.search(message.text)):
            return match[1].rstrip()
    return None


def tool_results(messages: Iterable[ModelMessage]) -> list[Results]:
    """For each assistant turn with tool calls, the texts of their results in order."""
    results: list[list[str]] = []
    for message in messages:
        if message.role == "assistant" and message.tool_calls:
            results.append([])
        elif message.role == "tool" and results:
            results[-1].append(message.text)
    return [texts for texts in results if texts]


def _work(turn: ChatTurn, changes: Sequence[Change], workdir: str, edit: Editing) -> Work:
    """Make the changes one by one; what the editing tools cannot do goes through the shell."""
    has_shell = turn.offers("Bash")
    left = list(changes)
    while left and turn.offers("Read", "Edit"):
        done = yield from _apply_change(left[0], turn, workdir, edit)
        if not done:
            if isinstance(left[0], Apply):
                return False
            break
        left.pop(0)
    if left and not has_shell:
        return False
    if left:
        results = yield _apply(left, "I apply the change as a patch.")
        if _failed(results):
            return False
    if has_shell:
        yield _call(
            "Bash", "Let me look at what changed.", command="git diff --stat", description="Show what changed"
        )
    return True


def _apply_change(change: Change, turn: ChatTurn, workdir: str, edit: Editing) -> Work:
    """Make one change with the tools that fit it; False when that did not work."""
    root = workdir.rstrip("/")
    match change:
        case Edit():
            return (yield from edit(change, f"{root}/{change.path}"))
        case Write() if turn.offers("Write"):
            path = f"{root}/{change.path}"
            results = yield _call("Write", f"I write `{change.path}`.", file_path=path, content=change.content)
            return not _failed(results)
        case Remove() if turn.offers("Bash"):
            command = f"rm -f -- {shlex.quote(f'{root}/{change.path}')}"
            results = yield _call("Bash", "This file goes.", command=command, description="Remove the file")
            return not _failed(results)
        case Apply() if turn.offers("Bash"):
            results = yield _apply([change], "This part I apply as a patch.")
            return not _failed(results)
        case _:
            return False


def _edit(edit: Edit, path: str) -> Work:
    size = edit.old.count("\n") + 1
    offset = max(1, edit.line - _AROUND)
    limit = edit.line - offset + size + _AROUND
    say = f"Let me read `{edit.path}` around line {edit.line}."
    results = yield _call("Read", say, file_path=path, offset=offset, limit=limit)
    window = _numbered_lines(results)
    seen = "\n".join(window.values())
    if _is_applied(edit, window):
        return True
    width = next(
        (width for width in range(_AROUND + 1) if _is_unique(_replacement(edit, window, width), seen)), _AROUND
    )
    for attempt in dict.fromkeys((width, _AROUND)):
        old, new = _replacement(edit, window, attempt)
        if not old or not new or any(line != line.rstrip() for line in new.split("\n")):
            return False
        say = "I change these lines."
        results = yield _call("Edit", say, file_path=path, old_string=old, new_string=new)
        if not _failed(results):
            return True
        if " matches " not in results[0]:
            return False
    return False


def _edit_tersely(edit: Edit, path: str) -> Work:
    """Read the whole file, and replace the lines that change, with as many around them as make them unique."""
    if edit.old.endswith("\n") != edit.new.endswith("\n"):
        return False  # the file's last newline comes or goes, which lines do not tell
    results = yield _call("Read", "", file_path=path)
    window = _numbered_lines(results)
    seen = "\n".join(window.values())
    if _is_applied(edit, window):
        return True
    lines = [(tag, text.rstrip("\r\n")) for tag, text in edit.lines]
    changed = [number for number, (tag, _) in enumerate(lines) if tag != " "]
    for width in range(len(lines)):
        part = lines[max(0, changed[0] - width) : changed[-1] + 1 + width]
        old, new = ("\n".join(text for tag, text in part if tag != other) for other in ("+", "-"))
        indent = min(len(text) - len(text.lstrip(" ")) for text in (old, new))
        if _is_unique((old[indent:], new[indent:]), seen):
            where = _definition(window, edit.line + changed[0])
            results = yield _call("Edit", where, file_path=path, old_string=old[indent:], new_string=new[indent:])
            return not _failed(results)
    return False


def _definition(window: dict[int, str], line: int) -> str:
    """The last line before `line` that begins a function or a class; empty where there is none."""
    before = (window[number].strip() for number in range(line - 1, 0, -1) if number in window)
    return next((text for text in before if text.startswith(("def ", "async def ", "class "))), "")


def _replacement(edit: Edit, window: dict[int, str], width: int) -> tuple[str, str]:
    """What to replace and by what, with `width` more lines of the window above and below."""
    old, new = _line_lists(edit)
    above = [window[line] for line in range(edit.line - width, edit.line) if line in window]
    end = edit.line + len(old)
    below = [window[line] for line in range(end, end + width) if line in window]
    return "\n".join(above + old + below), "\n".join(above + new + below)


def _line_lists(edit: Edit) -> tuple[list[str], list[str]]:
    """Lines before and after. A newline that ends both is left out; one that ends one is an empty last line."""
    old, new = (text.replace("\r\n", "\n") for text in (edit.old, edit.new))
    if all(text.endswith("\n") or not text for text in (old, new)):
        old_lines, new_lines = (text.removesuffix("\n").split("\n") if text else [] for text in (old, new))
        return old_lines, new_lines
    return old.split("\n"), new.split("\n")


def _is_applied(edit: Edit, window: dict[int, str]) -> bool:
    """Whether the change stands in the file already: made before the conversation was shortened."""
    old_lines, new_lines = _line_lists(edit)
    return _contains_lines(window, edit.line, new_lines) and not _contains_lines(window, edit.line, old_lines)


def _contains_lines(window: dict[int, str], start: int, lines: Sequence[str]) -> bool:
    return all(window.get(start + index) == line for index, line in enumerate(lines))


def _is_unique(replacement: tuple[str, str], seen: str) -> bool:
    old, new = replacement
    return bool(old.strip() and new.strip()) and -1 < seen.find(old) == seen.rfind(old)  # overlaps count too


def _numbered_lines(results: Results) -> dict[int, str]:
    """The lines of a Read result by their numbers."""
    lines: dict[int, str] = {}
    for line in results[0].split("\n"):
        if match := _NUMBERED.fullmatch(line.removesuffix("\r")):
            lines[int(match[1][:9])] = match[2]
    return lines


def _apply(changes: Sequence[Change], say: str) -> Action:
    patch = "".join(change.patch if change.patch.endswith("\n") else change.patch + "\n" for change in changes)
    # git asks for lines of context, or for this.
    options = (
        "--whitespace=nowarn" if re.search(r"^ ", patch, re.MULTILINE) else "--whitespace=nowarn --unidiff-zero"
    )
    command, text = f"git apply {options} <<'{{}}'", patch
    if any(unicodedata.category(character) in ("Cc", "Cf") for character in patch if character not in "\n\t"):
        # Claude Code refuses a command with characters that a person would not see.
        command, text = f"base64 -d <<'{{}}' | git apply {options}", base64.encodebytes(patch.encode()).decode()
    delimiter = "PATCH"
    while delimiter in text:
        delimiter += "_END"
    command = f"{command.format(delimiter)}\n{text}{delimiter}"
    return _call("Bash", say, command=command, description="Apply the patch")


def _call(tool: str, say: str, **arguments: str | int) -> Action:
    return Action(say, (ActionCall(tool, json.dumps(arguments, ensure_ascii=False)),))


def _failed(results: Results) -> bool:
    return results[0].lstrip().startswith(_FAILURES)
