"""Shell commands in one spelling: the same words give the same text, however they are spaced and quoted.

A command is put together again of its words with one space between them. Substitutions and here-documents stay to
the letter; a command with unbalanced quotes stays as it is.
"""

from __future__ import annotations

import re
import shlex

from understudy.util.shell import ShellSyntaxError, shell_tokens

LONGEST = 200_000
"""Characters of a command that is looked at; a longer one stays as it is."""

_LITERAL = re.compile(r"[^\s*?\[\]{}~!$`'\"\\;&|()<>#]*")
_COMMAND_STARTS = frozenset({";", "&", "&&", "||", "|", "|&", "(", ";;", "\n"}) | {
    *("do", "then", "else", "elif", "{", "!")
}
"""A new command begins behind these; a line break behind them separates nothing."""
_SPACE = " \t\n"


def canonical_command(command: str, cwd: str | None = None) -> str:
    """The command in its one spelling.

    A `cd` to `cwd` before all else is dropped, and a word that is a path inside `cwd` becomes relative, where the
    command does not go elsewhere. Comments, line breaks between commands and needless quotes do not count.
    """
    if len(command) > LONGEST:
        return command
    text = command.replace("\r", "")
    try:
        tokens, rest = _plain_tokens(text)
    except ShellSyntaxError:
        return text.strip(_SPACE)
    if cwd:
        tokens = _relative_to(tokens, cwd.rstrip("/") or "/")
    return " ".join(tokens) + rest


def _plain_tokens(text: str) -> tuple[list[str], str]:
    """The words and operators of a command, and what follows the line of its first here-document, to the letter.

    Raises ShellSyntaxError.
    """
    tokens: list[str] = []
    rest = ""
    announced = document = False
    for token in shell_tokens(text, strict=True):
        if token.kind == "word":
            # The delimiter of a here-document means something else when it is quoted.
            tokens.append(shlex.quote(token.value) if token.literal and not announced else token.raw)
            announced = False
            continue
        announced = token.kind == "redirect" and token.raw.endswith(("<<", "<<-"))
        document = document or (token.kind == "redirect" and "<<" in token.raw and "<<<" not in token.raw)
        if token.raw == "\n":
            if document:
                rest = ("\n" + text[token.end :]).rstrip(_SPACE)
                break
            if tokens and tokens[-1] not in _COMMAND_STARTS:
                tokens.append(";")
        elif token.raw in ("<(", ">("):
            tokens += token.raw  # as they are written with a space between them
        else:
            tokens.append(token.raw)
    while not rest and tokens and tokens[-1] == ";":
        tokens.pop()
    return tokens, rest


def _relative_to(tokens: list[str], cwd: str) -> list[str]:
    while len(tokens) >= 3 and tokens[0] == "cd" and tokens[2] in ("&&", ";") and _path(tokens[1]) == cwd:
        tokens = tokens[3:]
    if "cd" in tokens or "pushd" in tokens:
        return tokens
    first = True
    local: list[str] = []
    for word in tokens:
        path = _path(word)
        inside = path is not None and cwd != "/" and (path == cwd or path.startswith(cwd + "/"))
        if inside and path is not None:
            relative = path[len(cwd) :].strip("/") or "."
            # A program needs its directory, and a name must not look like an option.
            word = shlex.quote(f"./{relative}" if first or relative[0] == "-" else relative)
        local.append(word)
        first = word in _COMMAND_STARTS
    return local


def _path(word: str) -> str | None:
    """The word as a path without a slash at its end; None where it is not literal."""
    literal = word[1:-1] if len(word) > 1 and word[0] == word[-1] == "'" else word
    if word[:1] != "'" and not _LITERAL.fullmatch(word):
        return None
    return literal if "'" in literal else literal.rstrip("/") or literal[:1]
