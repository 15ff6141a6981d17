"""The commands of a shell script as far as signals need them: which programs run, which files they overwrite."""

from __future__ import annotations

import re
from collections import deque

from msgspec import Struct

from understudy.util.shell import shell_tokens

LONGEST = 40_000
"""Characters of a command that are looked at; what stands behind them is not."""

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")

# Programs that run what stands behind them, with how many words of their own follow at least.
_BEFORE = {
    "sudo": 0,
    "env": 0,
    "time": 0,
    "nice": 0,
    "nohup": 0,
    "command": 0,
    "exec": 0,
    "stdbuf": 0,
    "xvfb-run": 0,
    "timeout": 1,
    "then": 0,
    "do": 0,
    "else": 0,
    "if": 0,
    "while": 0,
    "until": 0,
    "!": 0,
    "{": 0,
    "npx": 0,
    "bunx": 0,
    "winpty": 0,
}
# Programs with a word of theirs behind which another command stands.
_RUNNERS = {
    "uv": ("run",),
    "poetry": ("run",),
    "pipenv": ("run",),
    "rye": ("run",),
    "pdm": ("run",),
    "pixi": ("run",),
    "conda": ("run",),
    "mamba": ("run",),
    "bundle": ("exec",),
    "pnpm": ("exec", "dlx"),
    "npm": ("exec",),
    "coverage": ("run",),
    "direnv": ("exec",),
}
_CONTAINERS = frozenset(("docker", "podman", "docker-compose"))
_CONTAINER_VALUES = frozenset(
    ("-v", "-w", "-e", "-u", "-p", "-f", "--name", "--volume", "--workdir", "--env", "--user")
)
_WITH_VALUE = frozenset(
    ("-n", "-p", "-u", "-s", "-k", "-k5", "--name", "--prefix", "--with", "--extra", "--python")
)
_SHELLS = frozenset(("bash", "sh", "zsh", "dash"))
_MAX_SCRIPTS = 3  # of `sh -c` inside each other
_MAX_SUBSTITUTIONS = 8


class ShellCommand(Struct):
    """One simple command: its `argv` without what only runs it, and the files that it `writes` by a redirection.

    `ends` is the operator behind it ("" at the end), `body` the text that a here-document gives it.
    """

    argv: list[str]
    writes: list[str]
    ends: str = ""
    body: str = ""

    @property
    def program(self) -> str:
        """The name of what runs, without its directory, "" for none."""
        return self.argv[0].rpartition("/")[2] if self.argv else ""


def shell_commands(text: str, depth: int = 0) -> list[ShellCommand]:
    """The simple commands of a shell's text, in order, those within `sh -c` and substitutions too."""
    commands: list[ShellCommand] = []
    for command in _simple_commands(text[:LONGEST]):
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
    readers: deque[ShellCommand] = deque()  # of the here-documents that begin on the next line
    target = (
        ""  # what the next word is: "" a word of the command, "read" or "write" a file, "document" a delimiter
    )

    def finish(operator: str) -> None:
        nonlocal current
        if current.argv or current.writes:
            current.ends = operator
            commands.append(current)
            current = ShellCommand([], [])
        for inner in substitutions if depth < _MAX_SUBSTITUTIONS else ():
            within = _simple_commands(inner, depth + 1)
            if within:
                within[-1].ends = within[-1].ends or ")"
            commands.extend(within)
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
            # What runs inside `<(…)` follows the command that reads it, which does not end there.
            finish("" if token.raw in ("<(", ">(") else token.raw)
            target = ""
    finish("")
    return commands


def _redirected(operator: str) -> str:
    """What the word behind a redirection is. Appending and the error stream overwrite no file of the project."""
    if operator.endswith(("<<", "<<-")) and not operator.endswith("<<<"):
        return "document"
    return "read" if "<" in operator or operator.startswith("2") or operator.endswith(("&", ">>")) else "write"


def _without_runners(argv: list[str]) -> list[str]:
    """The arguments from the program on that does the work: without `sudo`, `timeout 60`, `uv run` etc."""
    at = 0
    while at < len(argv):
        word = argv[at]
        name = word.rpartition("/")[2]
        if _ASSIGNMENT.match(word):
            at += 1
        elif name in _BEFORE:
            at = _options(argv, at + 1) + _BEFORE[name]
            if name == "if" and at < len(argv) and argv[at] in ("[", "[["):
                break
        elif name in _RUNNERS and at + 1 < len(argv) and argv[at + 1] in _RUNNERS[name]:
            at = _options(argv, at + 2)
            if name == "coverage" and argv[at - 1 : at] == ["-m"]:
                return ["python", "-m", *argv[at:]]
        elif name in _CONTAINERS and (start := _contained(argv, at)):
            at = start
        else:
            break
    return argv[at:]


def _contained(argv: list[str], at: int) -> int:
    """The index of the command that runs in a container, 0 where none does."""
    at += 2 if argv[at + 1 : at + 2] == ["compose"] else 1
    if argv[at : at + 1] not in (["exec"], ["run"]):
        return 0
    at += 1
    while at < len(argv) and argv[at].startswith("-"):
        at += 2 if argv[at] in _CONTAINER_VALUES else 1
    return at + 1


def _options(argv: list[str], at: int) -> int:
    while at < len(argv) and argv[at].startswith("-"):
        at += 2 if argv[at] in _WITH_VALUE else 1
    return at


def _script(command: ShellCommand) -> str | None:
    """What a shell is told to run: its `-c`, or the here-document that it reads."""
    if command.program == "eval":
        return " ".join(command.argv[1:])
    if command.program not in _SHELLS:
        return None
    for at, word in enumerate(command.argv[1:], 1):
        if word.startswith("-") and not word.startswith("--") and word.endswith("c"):
            return command.argv[at + 1] if at + 1 < len(command.argv) else None
        if not word.startswith("-"):
            return None
    return command.body or None
