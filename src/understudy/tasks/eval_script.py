"""Splits SWE-bench's evaluation scripts into phases that a grader runs one by one.

A script activates an environment, does bookkeeping with git, installs the program, applies the test patch and runs
the tests between two marker lines. Each statement is assigned to a phase by its words; one that cannot be assigned
is an error, because running it at another time than in the script could change a verdict.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import dropwhile
from typing import Literal

from msgspec import Struct

from understudy.errors import TaskError

START = ">>>>> Start Test Output"
END = ">>>>> End Test Output"
PIPEFAIL = "set -o pipefail"
"""The first line of every phase: the part of the harness's `set -uxo pipefail` that decides an exit code."""

_HARNESS_LINES = frozenset(("set -uxo pipefail", "set -euxo pipefail"))
_MAX_STATEMENTS = 2_000
_MAX_CHARACTERS = 16_384  # of one statement, without its here-document
_MAX_LINES = 500
_HEREDOC = re.compile(r"(?<!<)<<-?\s*(?P<quote>['\"]?)(?P<word>\w+)(?P=quote)(?!<)")
_SEPARATOR = re.compile(r"[();&|]*[;&|][();&|]*")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")
_LOOPS = dict.fromkeys(("for", "while", "until"), "done")
_KEYWORDS = {"if": "fi", "case": "esac", "{": "}", "function": "}", **_LOOPS}

StatementKind = Literal["environment", "nothing", "bookkeeping", "patch", "install", "other", "forbidden"]

_GIT = r"git(?: -[cC] \S+)*"
_PIP = r"(?:python[\d.]*|\S*/python[\d.]*)(?: -\S+)* -m pip|pip[\d.]*|uv pip"
# The kind of a command, by its words; the first matching row counts.
_COMMAND_KINDS: tuple[tuple[str, StatementKind], ...] = (
    (r"(?:source|\.|cd|pushd|popd|export|unset|set|shopt|alias|ulimit|umask|eval)(?: |$)", "environment"),
    (r"(?:conda|mamba|micromamba) (?:activate|deactivate)\b|nvm use\b|sdk use\b|pyenv shell\b", "environment"),
    (rf"{_GIT} (?:config|status|show|diff|log|rev-parse|branch|describe|remote -v)(?: |$)", "bookkeeping"),
    (rf"{_GIT} checkout [0-9a-f]{{7,40}}(?: --)?(?: [^-]\S*)*$", "bookkeeping"),
    (rf"{_GIT} apply\b", "patch"),
    (rf"{_GIT} (?:am|checkout|reset|stash|clean|restore|switch|merge|rebase|cherry-pick)\b", "forbidden"),
    (rf"{_GIT} (?:revert|commit|pull|fetch|rm|mv)\b|patch\b", "forbidden"),
    (rf"(?:{_PIP}) (?:install|uninstall)\b|python[\d.]* setup\.py\b", "install"),
    (r"(?:poetry|pdm|uv|hatch|conda|mamba)\b", "install"),
    (r"(?:make|cmake|meson|ninja|autoreconf|\./configure|\./autogen\.sh|bazel)(?: |$)", "install"),
    (r"(?:npm|pnpm|yarn|bun|npx|lerna|corepack)(?: |$)", "install"),
    (r"(?:mvn|\./mvnw|gradle|\./gradlew|ant|sbt|cargo|go|dotnet|mix|rebar3)(?: |$)", "install"),
    (r"(?:bundle|rake|gem|composer)(?: |$)", "install"),
)
_KIND_PATTERNS: tuple[tuple[re.Pattern[str], StatementKind], ...] = tuple(
    (re.compile(pattern), part) for pattern, part in _COMMAND_KINDS
)
_PRINTING_COMMANDS = re.compile(r"(?::|true|echo|printf|pwd|ls|date|whoami|uname|which|cat)(?: |$)|env$")
_PREFIXES = frozenset(("sudo", "time", "command", "exec", "nice", "env"))


class ScriptPhases(Struct, frozen=True):
    """An evaluation script in parts, each a bash script; `test_patch` is the patch that it applies, None without
    one.
    """

    activate: str
    before: str
    install: str
    command: str
    test_patch: str | None


class _Statement(Struct, frozen=True):
    text: str
    document: str | None
    first: int
    last: int


def split_script(script: str, workdir: str) -> ScriptPhases:
    """Split a script that runs in `workdir` into phases. Raises TaskError for a statement that fits no phase."""
    lines = script.split("\n")
    activate = [PIPEFAIL]
    before: list[str] = []
    install: list[str] = []
    afterwards: list[str] = []
    test_patch: str | None = None
    cwd = workdir
    for statement in _statements(lines):
        if START in statement.text:
            if _commands(statement.text) not in ([[":", START]], [["echo", START]]):
                raise _refusal(
                    statement,
                    f"marks the start of the tests and does something else; expected `: '{START}'` alone",
                )
            command = _test_command(lines[statement.last + 1 :])
            enter_directory = [f"cd {shlex.quote(cwd)}"] if cwd != workdir else []
            tests = "\n".join([*enter_directory, *afterwards, command])
            setup = "\n".join(activate), "\n".join(before), "\n".join(install)
            return ScriptPhases(*setup, tests, test_patch)
        kind = _statement_kind(statement, workdir, patched=test_patch is not None)
        if kind == "patch":
            if test_patch is not None or statement.document is None:
                raise _refusal(
                    statement,
                    "applies a patch; expected only the test patch, as one here-document for `git apply`",
                )
            test_patch = statement.document
        elif kind == "environment":
            new_directory = _destination(statement, cwd)
            if test_patch is None:
                if new_directory not in (None, workdir):
                    raise _refusal(
                        statement,
                        f"leaves {workdir} before the test patch; expected the commands before it to stay there",
                    )
                if not statement.text.startswith("cd ") and statement.text not in activate:
                    activate.append(statement.text)  # dropped, because every phase starts in the workdir
            else:
                install.append(statement.text)
                if new_directory is None:
                    afterwards.append(statement.text)
                cwd = new_directory or cwd
        elif kind == "install" or (kind == "other" and test_patch is not None):
            install.append(_source_lines(statement, lines))
            if test_patch is not None:
                cwd = _destination(statement, cwd) or cwd
        elif kind == "other":
            before.append(_source_lines(statement, lines))
    raise TaskError(
        f"eval_script: has no line with {START!r}; expected it before the tests and {END!r} after them; add both"
    )


def _refusal(statement: _Statement, problem: str) -> TaskError:
    return TaskError(f"eval_script: line {statement.first + 1} {problem}. Correct {statement.text[:120]!r}")


def _statements(lines: Sequence[str]) -> Iterator[_Statement]:
    """Yield each statement with its here-document, without comments and the harness's own first lines."""
    index = count = 0
    while index < len(lines):
        first = index
        text = lines[index].strip()
        index += 1
        if not text or text.startswith("#") or text in _HARNESS_LINES:
            continue
        count += 1
        if count > _MAX_STATEMENTS:
            raise TaskError(
                f"eval_script: has more than {_MAX_STATEMENTS} statements, the maximum; move some of them to the "
                "image, or leave the row out"
            )
        while text.endswith("\\") or len(text) > _MAX_CHARACTERS or _is_unclosed(text):
            if index - first > _MAX_LINES or len(text) > _MAX_CHARACTERS:
                raise TaskError(
                    f"eval_script: line {first + 1}: the statement that begins here has more than "
                    f"{_MAX_LINES} lines or {_MAX_CHARACTERS} characters: {text[:120]!r}; close a "
                    "quote that is open in it, or shorten it"
                )
            if index == len(lines):
                raise TaskError(
                    f"eval_script: line {first + 1}: a quote or a backslash at the end is not closed; close "
                    f"it: {text[:120]!r}"
                )
            more = lines[index].strip()
            text = f"{text[:-1]} {more}" if text.endswith("\\") else f"{text}\n{more}"
            index += 1
        document = None
        if match := _HEREDOC.search(text):
            start, word = index, match["word"]
            while index < len(lines) and lines[index] != word:
                index += 1
            if index == len(lines):
                raise TaskError(
                    f"eval_script: line {first + 1} starts a here-document, but no line is {word!r}, its "
                    "end; add it"
                )
            document = "\n".join(lines[start:index])
            index += 1
        yield _Statement(text, document, first, index - 1)


def _is_unclosed(text: str) -> bool:
    try:
        _shell_tokens(text)
    except ValueError:
        return True
    return False


@lru_cache(1024)  # cached, because thousands of rows contain the same few statements
def _shell_tokens(text: str) -> tuple[str, ...]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    return tuple(lexer)


def _commands(text: str) -> list[list[str]]:
    """Return the simple commands of a statement, each as a list of words."""
    commands: list[list[str]] = [[]]
    for word in _shell_tokens(text):
        if _SEPARATOR.fullmatch(word):
            commands.append([])
        else:
            commands[-1].append(word)
    return [command for command in commands if command]


def _statement_kind(statement: _Statement, workdir: str, *, patched: bool) -> StatementKind:
    commands = _commands(statement.text)
    if not commands:
        raise _refusal(statement, "has no command; expected one")
    first = commands[0][0]
    if end := _KEYWORDS.get(first):
        if commands[-1][-1] != end:
            raise _refusal(
                statement,
                f"begins with {first!r} and does not end with {end!r}; expected all of it in one line, joined by "
                ";",
            )
        return "other"
    kinds = {_command_kind(command, statement) for command in commands}
    if "forbidden" in kinds:
        raise _refusal(
            statement,
            "changes the repository with git or patch, which grading cannot reproduce; expected only commands "
            "that install or test: remove this one, or leave the row out",
        )
    if "patch" in kinds and len(kinds - {"nothing"}) > 1:
        raise _refusal(
            statement, "applies a patch and does something else; expected `git apply` as a statement of its own"
        )
    changes_directory = kinds > {"environment"} and any(
        command[0] in ("cd", "pushd", "popd") for command in commands
    )
    if changes_directory and not patched and _destination(statement, workdir) != workdir:
        raise _refusal(
            statement, "changes the directory and does something else; expected `cd` as a statement of its own"
        )
    for kind in ("patch", "install", "other", "environment", "bookkeeping"):
        if kind in kinds:
            return kind
    return "nothing"


def _command_kind(command: list[str], statement: _Statement) -> StatementKind:
    tokens = list(dropwhile(_ASSIGNMENT.match, command))
    if not tokens:
        return "environment"
    while len(tokens) > 1 and (tokens[0] in _PREFIXES or _ASSIGNMENT.match(tokens[0])):
        tokens.pop(0)
    text = " ".join(tokens)
    for pattern, kind in _KIND_PATTERNS:
        if pattern.match(text):
            return kind
    writes = statement.document is not None or any(word.startswith(">") for word in tokens)
    return "nothing" if _PRINTING_COMMANDS.match(text) and not writes else "other"


def _destination(statement: _Statement, cwd: str) -> str | None:
    """Return the directory that a statement changes to; None if it does not change the directory."""
    directory = None
    for command in _commands(statement.text):
        if command[0] in ("pushd", "popd") or (command[0] == "cd" and (len(command) != 2 or "$" in command[1])):
            raise _refusal(
                statement, "changes to a directory that cannot be determined; expected `cd` with a fixed path"
            )
        if command[0] == "cd":
            directory = posixpath.normpath(posixpath.join(directory or cwd, command[1]))
    return directory


def _source_lines(statement: _Statement, lines: Sequence[str]) -> str:
    return "\n".join(lines[statement.first : statement.last + 1])


def _test_command(lines: Sequence[str]) -> str:
    for index, line in enumerate(lines):
        if END in line:
            command = "\n".join(lines[:index]).strip("\n")
            if not command.strip():
                raise TaskError(
                    f"eval_script: has no command between the lines with {START!r} and {END!r}; put the "
                    "test command there"
                )
            if START in command:
                raise TaskError(
                    f"eval_script: has {START!r} twice, expected it once, before the tests; remove the second line"
                )
            return command
    raise TaskError(f"eval_script: has no line with {END!r} after the tests; add it")
