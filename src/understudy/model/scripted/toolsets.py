"""How each agent's tools are called and their results read; one class for each agent's set of tools."""

from __future__ import annotations

import base64
import json
import re
import shlex
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, cast

import msgspec
from msgspec import Struct

from understudy.model.protocol import ModelTool, ModelToolFunction
from understudy.model.scripted.changes import Edit

Lines = dict[int, str]
"""Lines of a file by their numbers, from 1, without their ends."""


class ActionCall(Struct, frozen=True):
    """A tool and the JSON text of its arguments."""

    name: str
    arguments: str


def action_call(tool: str, **arguments: Any) -> ActionCall:
    """Return a call of a tool with these arguments."""
    return ActionCall(tool, json.dumps(arguments, ensure_ascii=False))


class Toolset(ABC):
    """The tools of an agent. `shell` is the name of the one that runs commands, which may be missing.

    `edits` says that a text can be replaced by another; otherwise `edit_lines` replaces whole lines.
    """

    required: ClassVar[frozenset[str]] = frozenset()
    """The tools that have to be offered."""
    shell: ClassVar[str]
    edits: ClassVar[bool] = True

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)

    @classmethod
    def fits(cls, offered: Mapping[str, ModelToolFunction]) -> bool:
        """Return whether these tool names are the agent's."""
        return cls.required <= offered.keys()

    @property
    def has_shell(self) -> bool:
        """Whether commands can be run."""
        return self.shell in self.names

    @property
    def can_edit(self) -> bool:
        """Whether files can be read and changed without patches."""
        return self.required <= self.names

    def can_write(self) -> bool:
        """Whether new files can be written."""
        return False

    def run(self, command: str, description: str) -> ActionCall:
        """Run a command."""
        return action_call(self.shell, command=command, description=description)

    @abstractmethod
    def read(self, path: str, offset: int | None = None, limit: int | None = None) -> ActionCall:
        """Read a file: all of it, or `limit` lines from line `offset` on, counted from 1."""

    @abstractmethod
    def edit(self, path: str, edit: Edit, old: str, new: str) -> ActionCall:
        """Replace the text `old`, which occurs in the file once, by `new`; `edit` is the change to make."""

    def write(self, path: str, content: str) -> ActionCall:
        """Write a new file."""
        raise NotImplementedError

    def lines_read(self, result: str, offset: int) -> Lines:
        """Return the lines in the result of reading from line `offset` on."""
        lines: Lines = {}
        for line in result.split("\n"):
            if match := _NUMBERED.fullmatch(line.removesuffix("\r")):
                lines[int(match[1][:9])] = match[2]
        return lines

    def failed(self, result: str) -> bool:
        """Return whether a call failed, by its result."""
        return _FAILED.match(result.lstrip()) is not None

    def ambiguous(self, result: str) -> bool:
        """Return whether an edit failed because its text occurs in the file more than once."""
        return " matches " in result

    def finish(self) -> tuple[ActionCall, ...]:
        """Return the calls that end the work, for agents in which a response without calls does not end it."""
        return ()


_NUMBERED = re.compile(r" *(\d+)(?:\t|→|: ?)(.*)")
_FAILED = re.compile(
    r"Error|<tool_use_error>|error: |Could not find|Found multiple|Failed to |apply_patch verification failed"
    r"|Chunk ID:[^\n]*\n[^\n]*\nProcess exited with code [1-9]|Exit code: [1-9]"
    r"|(?:Command: |<untrusted_context>\n)(?s:.)*\nExit Code: [1-9]"
)
_PI_FAILED = re.compile(
    r"Could not |Found \d+ occurrences |E[A-Z]+: |(?s:.)*\n\nCommand exited with code [1-9]\d*\Z"
)
_OPENHANDS_FAILED = re.compile(
    r"\A(?:\[An error occurred during execution|Error|Tool '[^'\n]*' not found)"
    r"|\n\[Command finished with exit code [1-9]\d*\]\Z"
)
_GEMINI_PART = re.compile(r"\n(?s:.)*?\nStatus: Showing lines (\d+)-(?s:.)*?\n--- FILE CONTENT [^\n]*\n")
_PI_REST = re.compile(r"\n\n\[[^\n]* to continue\.\]\Z")


class ClaudeTools(Toolset):
    """Claude Code's tools; also used for tools that match no other agent."""

    required = frozenset(("Read", "Edit"))
    shell = "Bash"

    def can_write(self) -> bool:
        """See Toolset."""
        return "Write" in self.names

    def read(self, path: str, offset: int | None = None, limit: int | None = None) -> ActionCall:
        """See Toolset."""
        return action_call("Read", file_path=path, **_span(offset, limit))

    def edit(self, path: str, edit: Edit, old: str, new: str) -> ActionCall:
        """See Toolset."""
        return action_call("Edit", file_path=path, old_string=old, new_string=new)

    def write(self, path: str, content: str) -> ActionCall:
        """See Toolset."""
        return action_call("Write", file_path=path, content=content)


class OpenCodeTools(Toolset):
    """OpenCode's tools."""

    required = frozenset(("read", "edit"))
    shell = "bash"

    def can_write(self) -> bool:
        """See Toolset."""
        return "write" in self.names

    def read(self, path: str, offset: int | None = None, limit: int | None = None) -> ActionCall:
        """See Toolset."""
        return action_call("read", filePath=path, **_span(offset, limit))

    def edit(self, path: str, edit: Edit, old: str, new: str) -> ActionCall:
        """See Toolset."""
        return action_call("edit", filePath=path, oldString=old, newString=new)

    def write(self, path: str, content: str) -> ActionCall:
        """See Toolset."""
        return action_call("write", filePath=path, content=content)

    def ambiguous(self, result: str) -> bool:
        """See Toolset."""
        return result.startswith("Found multiple")


class PiTools(Toolset):
    """pi's tools; some have the same names as OpenCode's. Files are shown without line numbers."""

    required = frozenset(("read", "edit"))
    shell = "bash"

    @classmethod
    def fits(cls, offered: Mapping[str, ModelToolFunction]) -> bool:
        """See Toolset."""
        return super().fits(offered) and "path" in _parameters(offered["read"])

    def can_write(self) -> bool:
        """See Toolset."""
        return "write" in self.names

    def run(self, command: str, description: str) -> ActionCall:
        """See Toolset."""
        return action_call(self.shell, command=command)

    def read(self, path: str, offset: int | None = None, limit: int | None = None) -> ActionCall:
        """See Toolset."""
        return action_call("read", path=path, **_span(offset, limit))

    def edit(self, path: str, edit: Edit, old: str, new: str) -> ActionCall:
        """See Toolset."""
        return action_call("edit", path=path, edits=[{"oldText": old, "newText": new}])

    def write(self, path: str, content: str) -> ActionCall:
        """See Toolset."""
        return action_call("write", path=path, content=content)

    def lines_read(self, result: str, offset: int) -> Lines:
        """See Toolset."""
        return _plain_lines(_PI_REST.sub("\n", result), offset)

    def failed(self, result: str) -> bool:
        """See Toolset."""
        return _PI_FAILED.match(result) is not None

    def ambiguous(self, result: str) -> bool:
        """See Toolset."""
        return result.startswith("Found ")


class GeminiTools(Toolset):
    """Gemini CLI's tools. Files are shown without line numbers."""

    required = frozenset(("read_file", "replace"))
    shell = "run_shell_command"

    def can_write(self) -> bool:
        """See Toolset."""
        return "write_file" in self.names

    def read(self, path: str, offset: int | None = None, limit: int | None = None) -> ActionCall:
        """See Toolset."""
        end = None if offset is None or limit is None else offset + limit - 1
        span = {name: value for name, value in (("start_line", offset), ("end_line", end)) if value is not None}
        return action_call("read_file", file_path=path, **span)

    def edit(self, path: str, edit: Edit, old: str, new: str) -> ActionCall:
        """See Toolset."""
        instruction = "Change these lines."
        return action_call("replace", instruction=instruction, file_path=path, old_string=old, new_string=new)

    def write(self, path: str, content: str) -> ActionCall:
        """See Toolset."""
        return action_call("write_file", file_path=path, content=content)

    def lines_read(self, result: str, offset: int) -> Lines:
        """See Toolset."""
        if match := _GEMINI_PART.match(result):
            offset, result = int(match[1]), f"{result[match.end() :]}\n"
        return _plain_lines(result, offset)

    def ambiguous(self, result: str) -> bool:
        """See Toolset."""
        return "Expected 1 occurrence but found" in result


class QwenTools(Toolset):
    """Qwen Code's tools. Files are shown without line numbers, and lines are counted from 0."""

    required = frozenset(("read_file", "edit"))
    shell = "run_shell_command"

    def can_write(self) -> bool:
        """See Toolset."""
        return "write_file" in self.names

    def run(self, command: str, description: str) -> ActionCall:
        """See Toolset."""
        return action_call(self.shell, command=command, description=description, is_background=False)

    def read(self, path: str, offset: int | None = None, limit: int | None = None) -> ActionCall:
        """See Toolset."""
        return action_call("read_file", file_path=path, **_span(None if offset is None else offset - 1, limit))

    def edit(self, path: str, edit: Edit, old: str, new: str) -> ActionCall:
        """See Toolset."""
        return action_call("edit", file_path=path, old_string=old, new_string=new)

    def write(self, path: str, content: str) -> ActionCall:
        """See Toolset."""
        return action_call("write_file", file_path=path, content=content)

    def lines_read(self, result: str, offset: int) -> Lines:
        """See Toolset."""
        if match := re.match(r"Showing lines (\d+)-\d+ of [^\n]*\n\n---\n\n", result):
            offset, result = int(match[1]), result[match.end() :]
        return _plain_lines(result, offset)

    def ambiguous(self, result: str) -> bool:
        """See Toolset."""
        return "occurrences" in result and " 0 occurrences" not in result


class OpenHandsTools(Toolset):
    """OpenHands' tools. One tool, whose first argument says what to do, reads and changes files."""

    required = frozenset(("file_editor",))
    shell = "terminal"

    def can_write(self) -> bool:
        """See Toolset."""
        return self.can_edit

    def run(self, command: str, description: str) -> ActionCall:
        """See Toolset."""
        return action_call(self.shell, command=command)

    def read(self, path: str, offset: int | None = None, limit: int | None = None) -> ActionCall:
        """See Toolset."""
        span = {} if offset is None or limit is None else {"view_range": [offset, offset + limit - 1]}
        return action_call("file_editor", command="view", path=path, **span)

    def edit(self, path: str, edit: Edit, old: str, new: str) -> ActionCall:
        """See Toolset."""
        return action_call("file_editor", command="str_replace", path=path, old_str=old, new_str=new)

    def write(self, path: str, content: str) -> ActionCall:
        """See Toolset."""
        return action_call("file_editor", command="create", path=path, file_text=content)

    def failed(self, result: str) -> bool:
        """See Toolset."""
        return _OPENHANDS_FAILED.search(result) is not None

    def ambiguous(self, result: str) -> bool:
        """See Toolset."""
        return "No replacement was performed. Multiple occurrences of " in result


class ShellTools(Toolset):
    """Tools with which files can only be read by a shell."""

    def read(self, path: str, offset: int | None = None, limit: int | None = None) -> ActionCall:
        """See Toolset."""
        command = f"nl -ba {shlex.quote(path)}"
        if offset is not None and limit is not None:
            command += f" | sed -n '{offset},{offset + limit - 1}p'"
        return self.run(command, "Read the file")


class CodexTools(ShellTools):
    """Codex's tools: a shell, and patches in a format of its own."""

    required = frozenset(("exec_command", "apply_patch"))
    shell = "exec_command"
    edits = False

    def run(self, command: str, description: str) -> ActionCall:
        """See Toolset."""
        return action_call(self.shell, cmd=command)

    def edit(self, path: str, edit: Edit, old: str, new: str) -> ActionCall:
        """See Toolset. Lines that stay the same are context, by which Codex finds the place."""
        before, after = old.split("\n"), new.split("\n")
        shorter = min(len(before), len(after))
        above = next((n for n in range(shorter) if before[n] != after[n]), shorter)
        unmatched = shorter - above
        below = next((n for n in range(unmatched) if before[-1 - n] != after[-1 - n]), unmatched)
        lines = [f" {line}" for line in before[:above]]
        lines += [f"-{line}" for line in before[above : len(before) - below]]
        lines += [f"+{line}" for line in after[above : len(after) - below]]
        lines += [f" {line}" for line in before[len(before) - below :]]
        return self._patch(f"*** Update File: {path}", "@@", *lines)

    def can_write(self) -> bool:
        """See Toolset."""
        return True

    def write(self, path: str, content: str) -> ActionCall:
        """See Toolset. Codex always ends the last line with a newline."""
        return self._patch(
            f"*** Add File: {path}", *(f"+{line}" for line in content.removesuffix("\n").split("\n"))
        )

    def _patch(self, *lines: str) -> ActionCall:
        text = "\n".join(("*** Begin Patch", *lines, "*** End Patch"))
        return action_call("apply_patch", input=text)


class BashTools(ShellTools):
    """mini-swe-agent's tools: one shell, whose results are JSON, and a command that ends the work."""

    required = frozenset(("bash",))
    shell = "bash"
    edits = False

    def run(self, command: str, description: str) -> ActionCall:
        """See Toolset."""
        return action_call(self.shell, command=command)

    def edit(self, path: str, edit: Edit, old: str, new: str) -> ActionCall:
        """See Toolset. The edit is made as a patch."""
        return self.run(patch_command(edit.patch), "Apply the patch")

    def lines_read(self, result: str, offset: int) -> Lines:
        """See Toolset."""
        return super().lines_read(_output(result)[1], offset)

    def failed(self, result: str) -> bool:
        """See Toolset."""
        return _output(result)[0] != 0

    def finish(self) -> tuple[ActionCall, ...]:
        """See Toolset."""
        return (self.run("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT", "Submit"),)


class _ShellResult(Struct):
    """mini-swe-agent's result of a command: its whole output, or the beginning and end."""

    returncode: int
    output: str = ""
    output_head: str = ""


def _output(result: str) -> tuple[int, str]:
    """Return the exit code of a command and its output, as far as it is shown."""
    try:
        output = msgspec.json.decode(result, type=_ShellResult)
    except msgspec.MsgspecError:
        return 1, ""
    return output.returncode, output.output or output.output_head


def _plain_lines(text: str, first: int) -> Lines:
    """Return lines that are shown without numbers; the first one has the number `first`."""
    texts = text.removesuffix("\n").split("\n")
    return {first + index: line.removesuffix("\r") for index, line in enumerate(texts)}


def _parameters(tool: ModelToolFunction) -> Mapping[str, Any]:
    """Return the parameters of a tool by their names."""
    properties = (tool.parameters or {}).get("properties")
    return cast(dict[str, Any], properties) if isinstance(properties, dict) else {}


def _span(offset: int | None, limit: int | None) -> dict[str, int]:
    return {name: value for name, value in (("offset", offset), ("limit", limit)) if value is not None}


def patch_command(patch: str) -> str:
    """Return the command that applies a unified diff."""
    # git needs context lines, or this option.
    options = (
        "--whitespace=nowarn" if re.search(r"^ ", patch, re.MULTILINE) else "--whitespace=nowarn --unidiff-zero"
    )
    command, text = f"git apply {options} <<'{{}}'", patch
    if any(unicodedata.category(character) in ("Cc", "Cf") for character in patch if character not in "\n\t"):
        # Claude Code refuses a command with invisible characters.
        command, text = f"base64 -d <<'{{}}' | git apply {options}", base64.encodebytes(patch.encode()).decode()
    delimiter = "PATCH"
    while delimiter in text:
        delimiter += "_END"
    return f"{command.format(delimiter)}\n{text}{delimiter}"


_TOOLSETS: tuple[type[Toolset], ...] = (
    CodexTools, GeminiTools, QwenTools, PiTools, OpenCodeTools, OpenHandsTools, BashTools,
)  # fmt: skip
"""Those with most tools first: the others' may be among them."""


def toolset_of(tools: Iterable[ModelTool]) -> Toolset:
    """Return the toolset for the offered tools; Claude Code's if they match no other agent."""
    offered = {tool.function.name: tool.function for tool in tools}
    return next((kind(offered) for kind in _TOOLSETS if kind.fits(offered)), ClaudeTools(offered))
