"""Shell commands taken apart, as far as must be known: which programs run, and which files are written to."""

from __future__ import annotations

import re

from msgspec import Struct

LONGEST = 40_000
"""Characters of a command that are looked at; what stands behind them is not."""

# No alternative begins as another does, and none gives back what it took: linear in any text.
_TOKEN = re.compile(
    r"""(?P<space>[ \t\r]++|\\\n|(?<![^\s;&|(])\#[^\n]*+)
    |(?P<end>&&|\|\||;;|\|&|[;|\n()]|&(?!>))
    |(?P<to>\d*>>|\d*>\||\d*>&|\d*>(?!\()|&>>?)
    |(?P<here><<-?(?!<))
    |(?P<from><<<|<(?!\())
    |(?P<piece>'[^']*+'|"(?:[^"\\]|\\.)*+"|\\.|\$\(|[<>]\(|[^\s;&|()<>'"\\$\d]++|\d++|.)""",
    re.VERBOSE | re.DOTALL,
)
_ASSIGNED = re.compile(r"[A-Za-z_]\w*=")

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
_DEEPEST = 3


class Command(Struct):
    """One simple command: its `words` without what only runs it, and the files that it `writes` by a redirection.

    `ends` is the operator behind it ("" at the end), `body` the text that a here document gives it.
    """

    words: list[str]
    writes: list[str]
    ends: str = ""
    body: str = ""

    @property
    def program(self) -> str:
        """The name of what runs, without its directory, "" for none."""
        return self.words[0].rpartition("/")[2] if self.words else ""


def commands(text: str, depth: int = 0) -> list[Command]:
    """The simple commands of a shell's text, in order, those within `sh -c` and substitutions too."""
    found: list[Command] = []
    for command in _simple(text[:LONGEST]):
        command.words = _own(command.words)
        script = _script(command) if depth < _DEEPEST else None
        if script is None:
            found.append(command)
            continue
        within = commands(script, depth + 1)
        if within and not within[-1].ends:
            within[-1].ends = command.ends
        found += within
    return found


def _simple(text: str) -> list[Command]:
    found: list[Command] = []
    current = Command([], [])
    word: list[str] = []
    waiting: list[tuple[str, Command]] = []  # here documents whose text begins on the next line
    target: str | None = None

    def close() -> None:
        nonlocal target
        if not word:
            return
        whole = "".join(word)
        word.clear()
        if target == "here":
            waiting.append((whole, current))
        elif target == "to":
            current.writes.append(whole)
        elif target is None:
            current.words.append(whole)
        target = None

    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            break
        at = match.end()
        kind, token = match.lastgroup, match.group()
        if kind == "piece" and token not in ("$(", "<(", ">("):
            word.append(_unquoted(token))
            continue
        close()
        if kind in ("end", "piece"):
            target = None
            if current.words or current.writes:
                current.ends = token if kind == "end" else ""
                found.append(current)
            current = Command([], [])
            if token == "\n" and waiting:
                for word_, command in waiting:
                    at = _document(text, at, word_, command)
                waiting.clear()
        elif kind == "to":
            target = "aside" if token.endswith(("&", ">>")) or token.startswith("2") else "to"
        elif kind in ("here", "from"):
            target = "here" if kind == "here" else "aside"
    close()
    if current.words or current.writes:
        found.append(current)
    return found


def _document(text: str, at: int, mark: str, command: Command) -> int:
    """Takes the here document that begins at `at`; returns where it ends."""
    begun = at
    while at < len(text):
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        if text[at:end].strip("\t \r") == mark:
            command.body = text[begun:at]
            return min(end + 1, len(text))
        at = end + 1
    command.body = text[begun:]
    return len(text)


def _unquoted(token: str) -> str:
    if token[0] == "'":
        return token[1:-1] if len(token) > 1 else ""
    if token[0] == '"':
        return token[1:-1].replace('\\"', '"') if len(token) > 1 else ""
    return token[1:] if token[0] == "\\" and len(token) > 1 else token


def _own(words: list[str]) -> list[str]:
    """The words from the program on that does the work."""
    at = 0
    while at < len(words):
        word = words[at]
        name = word.rpartition("/")[2]
        if _ASSIGNED.match(word):
            at += 1
        elif name in _BEFORE:
            at = _options(words, at + 1) + _BEFORE[name]
            if name == "if" and at < len(words) and words[at] in ("[", "[["):
                break
        elif name in _RUNNERS and at + 1 < len(words) and words[at + 1] in _RUNNERS[name]:
            at = _options(words, at + 2)
            if name == "coverage" and words[at - 1 : at] == ["-m"]:
                return ["python", "-m", *words[at:]]
        elif name in _CONTAINERS and (begun := _contained(words, at)):
            at = begun
        else:
            break
    return words[at:]


def _contained(words: list[str], at: int) -> int:
    """Where the command begins that is run in a container, 0 where none is."""
    at += 2 if words[at + 1 : at + 2] == ["compose"] else 1
    if words[at : at + 1] not in (["exec"], ["run"]):
        return 0
    at += 1
    while at < len(words) and words[at].startswith("-"):
        at += 2 if words[at] in _CONTAINER_VALUES else 1
    return at + 1


def _options(words: list[str], at: int) -> int:
    while at < len(words) and words[at].startswith("-"):
        at += 2 if words[at] in _WITH_VALUE else 1
    return at


def _script(command: Command) -> str | None:
    """What a shell is told to run: its `-c`, or the here document it reads."""
    if command.program == "eval":
        return " ".join(command.words[1:])
    if command.program not in _SHELLS:
        return None
    for at, word in enumerate(command.words[1:], 1):
        if word.startswith("-") and not word.startswith("--") and word.endswith("c"):
            return command.words[at + 1] if at + 1 < len(command.words) else None
        if not word.startswith("-"):
            return None
    return command.body or None
