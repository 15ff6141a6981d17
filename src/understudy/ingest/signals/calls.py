"""The calls of a turn with their results, in any agent's format: how they ended, and which shell commands they
ran.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from typing import Any

from msgspec import Struct

from understudy.ingest.json_values import items, mapping, string
from understudy.ingest.trace import Message, text_of
from understudy.util.shell import command_text, shell_tokens
from understudy.wire.arguments import parse_object

MAX_COMMAND_CHARS = 40_000
"""Only this many characters of a command are parsed; the rest is ignored."""

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")

# Programs that run the command after them. Only `timeout` takes an argument first.
_BEFORE = frozenset((
    "timeout", "sudo", "env", "time", "nice", "nohup", "command", "exec", "stdbuf", "xvfb-run", "then", "do",
    "else", "if", "while", "until", "!", "{", "npx", "bunx", "winpty",
))  # fmt: skip
# Programs that run another command after a subcommand, such as `uv run`.
_RUNNERS = {
    **dict.fromkeys(("uv", "poetry", "pipenv", "rye", "pdm", "pixi", "conda", "mamba", "coverage"), ("run",)),
    **dict.fromkeys(("bundle", "npm", "direnv"), ("exec",)),
    "pnpm": ("exec", "dlx"),
}
_CONTAINERS = frozenset(("docker", "podman", "docker-compose"))
_CONTAINER_VALUES = {"-v", "-w", "-e", "-u", "-p", "-f", "--name", "--volume", "--workdir", "--env", "--user"}
_WITH_VALUE = {"-n", "-p", "-u", "-s", "-k", "-k5", "--name", "--prefix", "--with", "--extra", "--python"}
_SHELLS = frozenset(("bash", "sh", "zsh", "dash"))
_MAX_SCRIPTS = 3  # nested `sh -c`
_MAX_SUBSTITUTIONS = 8


class ShellCommand(Struct):
    """A simple shell command: its `argv` without wrappers such as `sudo`, and the files that it redirects output
    to (`writes`).

    `ends` is the operator after it ("" at the end), `body` the contents of its here-document.
    """

    argv: list[str]
    writes: list[str]
    ends: str = ""
    body: str = ""

    @property
    def program(self) -> str:
        """The program's name without its directory, or ""."""
        return self.argv[0].rpartition("/")[2] if self.argv else ""


def shell_commands(text: str, depth: int = 0) -> list[ShellCommand]:
    """Return the simple commands of a shell script in order, including those within `sh -c` and substitutions."""
    commands: list[ShellCommand] = []
    for command in _simple_commands(text[:MAX_COMMAND_CHARS]):
        command.argv = _without_runners(command.argv)
        script = _script(command) if depth < _MAX_SCRIPTS else None
        if script is None:
            commands.append(command)
            continue
        inner = shell_commands(script, depth + 1)
        if inner and not inner[-1].ends:
            inner[-1].ends = command.ends
        commands += inner
    return commands


def _simple_commands(text: str, depth: int = 0) -> list[ShellCommand]:
    commands: list[ShellCommand] = []
    current = ShellCommand([], [])
    substitutions: list[str] = []
    readers: deque[ShellCommand] = deque()  # commands whose here-documents begin on the next line
    # The role of the next word: "" a word of the command, "read" or "write" a file, "document" a delimiter.
    target = ""

    def finish(operator: str) -> None:
        nonlocal current
        if current.argv or current.writes:
            current.ends = operator
            commands.append(current)
            current = ShellCommand([], [])
        for inner in substitutions if depth < _MAX_SUBSTITUTIONS else ():
            inner_commands = _simple_commands(inner, depth + 1)
            if inner_commands:
                inner_commands[-1].ends = inner_commands[-1].ends or ")"
            commands.extend(inner_commands)
        substitutions.clear()

    for token in shell_tokens(text):
        if token.kind == "word":
            if target == "document":
                readers.append(current)
            elif target == "write":
                current.writes.append(token.value)
            elif not target:
                current.argv.append(token.value)
            target = ""
            substitutions += token.substitutions
        elif token.kind == "redirect":
            target = _redirected(token.raw)
        elif token.kind == "document":
            readers.popleft().body = token.value
        else:
            # What runs inside `<(…)` comes after the command that reads it, which does not end there.
            finish("" if token.raw in ("<(", ">(") else token.raw)
            target = ""
    finish("")
    return commands


def _redirected(operator: str) -> str:
    """Return the role of the word after a redirection operator.

    Appending and redirecting stderr count as "read", since they do not overwrite a project file.
    """
    if operator.endswith(("<<", "<<-")) and not operator.endswith("<<<"):
        return "document"
    return "read" if "<" in operator or operator.startswith("2") or operator.endswith(("&", ">>")) else "write"


def _without_runners(argv: list[str]) -> list[str]:
    """Return the arguments from the actual program on, without `sudo`, `timeout 60`, `uv run` and the like."""
    index = 0
    while index < len(argv):
        word = argv[index]
        name = word.rpartition("/")[2]
        if _ASSIGNMENT.match(word):
            index += 1
        elif name in _BEFORE:
            index = _options(argv, index + 1) + (name == "timeout")
            if name == "if" and index < len(argv) and argv[index] in ("[", "[["):
                break
        elif name in _RUNNERS and index + 1 < len(argv) and argv[index + 1] in _RUNNERS[name]:
            index = _options(argv, index + 2)
            if name == "coverage" and argv[index - 1 : index] == ["-m"]:
                return ["python", "-m", *argv[index:]]
        elif name in _CONTAINERS and (start := _contained(argv, index)):
            index = start
        else:
            break
    return argv[index:]


def _contained(argv: list[str], index: int) -> int:
    """Return the index of the command that runs inside a container, or 0 if there is none."""
    index += 2 if argv[index + 1 : index + 2] == ["compose"] else 1
    if argv[index : index + 1] not in (["exec"], ["run"]):
        return 0
    index += 1
    while index < len(argv) and argv[index].startswith("-"):
        index += 2 if argv[index] in _CONTAINER_VALUES else 1
    return index + 1


def _options(argv: list[str], index: int) -> int:
    while index < len(argv) and argv[index].startswith("-"):
        index += 2 if argv[index] in _WITH_VALUE else 1
    return index


def _script(command: ShellCommand) -> str | None:
    """Return the script that a shell is told to run, by `-c` or a here-document, or None."""
    if command.program == "eval":
        return " ".join(command.argv[1:])
    if command.program not in _SHELLS:
        return None
    for index, word in enumerate(command.argv[1:], 1):
        if word.startswith("-") and not word.startswith("--") and word.endswith("c"):
            return command.argv[index + 1] if index + 1 < len(command.argv) else None
        if not word.startswith("-"):
            return None
    return command.body or None


MARKS_ERRORS = frozenset(("claude-code",))
"""Formats whose logs state for each result whether it is an error."""

# Agents whose models write commands into their text. The result is the next message.
_BLOCKS = frozenset(("mini-swe-agent", "swe-agent", "swe-smith", "swe-rebench"))
_LANGUAGES = frozenset(("", "bash", "sh", "shell", "mswea_bash_command"))
_SAID_TOOLS = ("execute_command", "write_to_file", "replace_in_file", "apply_diff")
_FIELDS = ("command", "path", "content", "diff")

# Tools that run a command; `_SHELL` maps each to the argument that holds the command.
_COMMAND_TOOLS = (
    "bash", "run", "shell", "local_shell", "shell_command", "run_shell_command", "execute_bash", "terminal",
    "run_terminal_cmd", "run_command", "execute_command", "powershell",
)  # fmt: skip
_SHELL: dict[str, str] = {
    **dict.fromkeys(_COMMAND_TOOLS, "command"),
    "container.exec": "cmd", "exec_command": "cmd", "bash_command": "keystrokes",
}  # fmt: skip

_HEAD = 600
_TAIL = 400
_TAKEN_BACK = "Correction to the text above: this call was stopped while running"

# Messages of refused calls, by Claude Code, then Codex, Gemini, Cline, OpenHands and the terminal.
_DENIED = (
    "The user doesn't want to proceed with this tool use", "Claude requested permissions to ",
    "Permission to use ", "Permission for this ", "This command requires approval",
    "This Bash command contains multiple operations", "The agent proposed a plan that was rejected by the user",
    "exec command rejected by user", "patch rejected by user", "rejected by user",
    "[Operation Cancelled] Reason: User did not allow", "[Operation Cancelled] Reason: User denied",
    "User did not allow tool call", "The user denied this operation", "Operation denied by user",
    "Action rejected", "User rejected ", "Tool use rejected",
)  # fmt: skip
_USER_QUESTIONS = frozenset(("Exit plan mode?", "Answer questions?"))
_DENIED_END = ("[Last action has been rejected by the user]",)
_INTERRUPTED = (
    "The user doesn't want to take this action right now", "[Request interrupted by user", "[Operation Cancelled]",
    "aborted by user", "Interrupted by user", "Interrupted ·",
)  # fmt: skip
_INTERRUPTED_END = ("[Request interrupted by user for tool use]", "[Request interrupted by user]")
_FAILED = (
    "<tool_use_error>", "Error: ", "Error executing tool", "ERROR:", "Error\n", "No replacement was performed",
    "apply_patch verification failed", "Failed to apply", "Failed to edit", "Failed to read",
    "failed to parse function arguments", "unsupported call: ", "The tool execution failed", "Invalid `",
)  # fmt: skip
_FAILED_END = ("[Error occurred in processing last action]",)

_CODES = (
    re.compile(r"^Exit code:? (-?\d{1,5})\b"),
    re.compile(r"^Exit Code: (-?\d{1,5})\b", re.MULTILINE),
    re.compile(r"^Process exited with code (-?\d{1,5})\b", re.MULTILINE),
    re.compile(r"^<returncode>(-?\d{1,5})</returncode>", re.MULTILINE),
    re.compile(r'"metadata": ?\{"exit_code": ?(-?\d{1,5})'),
    re.compile(r"\[(?:Command finished|The command completed) with exit code (-?\d{1,5})", re.MULTILINE),
)
_CODE_SIGNS = ("xit", "<returncode>")


class LoggedCall(Struct):
    """A tool call. `text` is its result, None if the log does not hold it.

    At most one of `denied`, `interrupted` and `failed` is true. `code` is the exit code if the result shows it, or
    0 for a result that is not marked as an error in a log that marks errors. `script_text` and `parsed` are
    caches.
    """

    name: str
    arguments: dict[str, Any]
    text: str | None = None
    denied: bool = False
    interrupted: bool = False
    failed: bool = False
    code: int | None = None
    script_text: str | None = None
    parsed: list[ShellCommand] | None = None

    @property
    def completed(self) -> bool:
        """Whether the call ran to its end: it has a result, and was neither refused nor interrupted."""
        return self.text is not None and not (self.denied or self.interrupted)

    @property
    def script(self) -> str:
        """The text that the call passed to a shell, or "" if it did not call one."""
        if self.script_text is None:
            self.script_text = command_of(self.name, self.arguments) or ""
        return self.script_text

    def shell(self) -> list[ShellCommand]:
        """Return the commands in its script."""
        if self.parsed is None:
            self.parsed = shell_commands(self.script) if self.script else []
        return self.parsed


def command_of(name: str, arguments: dict[str, Any]) -> str | None:
    """Return the text that a call passes to a shell, or None for other tools."""
    key = _SHELL.get(name.lower())
    if key is None:
        return None
    raw = arguments.get(key) or arguments.get("command") or arguments.get("cmd")
    if isinstance(raw, list):
        return command_text([str(word) for word in items(raw)])
    return string(raw)


def call_of(raw: dict[str, Any], result: Message | None, marked: bool) -> LoggedCall:
    """Return a call with its result. `marked`: the log marks every result that is an error."""
    function = mapping(raw.get("function"))
    call = LoggedCall(string(function.get("name")) or "", arguments_of(function.get("arguments")))
    if result is not None:
        set_result(call, text_of(result.get("content")), bool(result.get("is_error")), marked)
    return call


def arguments_of(raw: Any) -> dict[str, Any]:
    """Return the arguments of a call, or {} if they are not a JSON object."""
    return parse_object(raw) or {} if isinstance(raw, str) else {}


def set_result(call: LoggedCall, text: str, error: bool, marked: bool) -> None:
    """Set the result of a call, and derive from it how the call ended."""
    call.text = text
    if marked and not error:
        call.code = 0
        return
    call.code = _code(text)
    head, tail = text[:_HEAD].lstrip(), text[-_TAIL:].rstrip()
    if _TAKEN_BACK in text[:_HEAD]:
        call.interrupted = True
    elif head.startswith(_DENIED) or tail.endswith(_DENIED_END) or (error and head in _USER_QUESTIONS):
        call.denied = True
    elif head.startswith(_INTERRUPTED) or tail.endswith(_INTERRUPTED_END):
        call.interrupted = True
    else:
        looks_failed = not marked and (head.startswith(_FAILED) or tail.endswith(_FAILED_END))
        call.failed = error or looks_failed or bool(call.code)


def _code(text: str) -> int | None:
    """Return the exit code stated at the beginning or the end of a result, or None."""
    for part in (text[:_HEAD], text[-_TAIL:]) if len(text) > _HEAD else (text,):
        if any(sign in part for sign in _CODE_SIGNS):
            for pattern in _CODES:
                if match := pattern.search(part):
                    return int(match[1])
    return None


def calls_in_text(format: str, answer: str, after: Iterable[Message]) -> list[LoggedCall]:
    """Return the calls that a model wrote into its text, in formats that have them.

    The next message is their result.
    """
    if format in _BLOCKS:
        calls = _functions(answer) or _fenced(answer)
    elif format == "cline":
        calls = _tagged(answer)
    else:
        return []
    result = next((message for message in after if message.get("role") == "user"), None)
    if calls and result is not None:
        text = text_of(result.get("content"))
        if format == "cline":
            text = text.partition("] Result:\n")[2] or text
        set_result(calls[0], text, False, False)
    return calls


def _fenced(answer: str) -> list[LoggedCall]:
    parts = answer.split("```")
    closed = len(parts) - 2
    for index in range(closed - (closed + 1) % 2, 0, -2):
        language, _, script = parts[index].partition("\n")
        if language.strip() in _LANGUAGES:
            return [LoggedCall("bash", {"command": script})]
    return []


def _functions(answer: str) -> list[LoggedCall]:
    """Return the last call written as `<function=name><parameter=key>value</parameter></function>`."""
    call_text = answer.rpartition("<function=")[2] if "<function=" in answer else ""
    name, closed, body = call_text.partition(">")
    if not closed:
        return []
    fields: dict[str, Any] = {}
    for part in body.split("<parameter=")[1:]:
        key, _, value = part.partition(">")
        fields[key] = value.rpartition("</parameter>")[0].strip("\n")
    return [LoggedCall(name, fields)]


def _tagged(answer: str) -> list[LoggedCall]:
    """Return the first call written as XML, since programs that use such calls run one per response."""
    for name in _SAID_TOOLS:
        call_text = _between(answer, name)
        if call_text is not None:
            fields = {field: value for field in _FIELDS if (value := _between(call_text, field)) is not None}
            return [LoggedCall(name, {key: value.strip("\n") for key, value in fields.items()})]
    return []


def _between(text: str, tag: str) -> str | None:
    start = text.find(f"<{tag}>")
    if start < 0:
        return None
    start += len(tag) + 2
    end = text.rfind(f"</{tag}>")
    return text[start:end] if end >= start else None
