"""Splits a shell command into words, operators, redirections and here-documents.

It follows POSIX shells and bash as far as possible without evaluating anything: quotes and escapes are resolved,
expansions and substitutions are kept as written. What a command does is left to the caller. The time is linear in
the length of the text.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

# One of these stands at the beginning of each token; a word that is not `simple` is read piece by piece.
_TOKEN = re.compile(
    r"""(?P<blank>(?:[ \t\r]|\\\n)+)
    |(?P<comment>\#[^\n]*)
    |(?P<redirect>\d*(?:<<<|<<-?|<>|>>|>\||[<>]&)|\d+[<>]|[<>](?!\()|&>>?)
    |(?P<operator>[<>]\(|&&|\|\||\|&|;;&?|;&|[;&|()\n])
    |(?P<simple>[^ \t\r\n'"\\$`;&|()<>]+(?=[ \t\r\n;&|()<>]|\Z))""",
    re.VERBOSE,
)
_PLAIN = re.compile(r"[^ \t\r\n'\"\\$`;&|()<>]+")
_LITERAL = re.compile(r"[^\s*?\[\]{}~!#]*")
_ESCAPED = re.compile(r"\\([\"\\$`]|\n)")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_MAX_NESTING = 32

_SHELLS = frozenset(("bash", "sh", "zsh", "dash", "powershell", "pwsh"))
_COMMAND_FLAGS = frozenset(("-c", "-lc", "-cl", "-ic", "-ilc"))


class ShellSyntaxError(ValueError):
    """A quote or substitution that is never closed, or too deep nesting."""


class ShellToken(NamedTuple):
    """A piece of shell text.

    `kind`: a `word`, a control `operator` (a line break too, and the `(` or `<(` that opens a list), a `redirect`
    with the number before it, or the `document` that a `<<` announced, which comes behind the line break.
    `raw` is the text as it is written. `value` is a word without its quotes, its expansions as they are written;
    or the lines of a document. `literal`: the word holds no expansion and no pattern, so that a program gets
    `value`. `substitutions` are the texts inside the unquoted `$(…)` and backquotes of a word. `end` is the
    position behind the token.
    """

    kind: Literal["word", "operator", "redirect", "document"]
    raw: str
    value: str
    end: int
    literal: bool = True
    substitutions: tuple[str, ...] = ()


def shell_tokens(text: str, *, strict: bool = False) -> Iterator[ShellToken]:
    """Yield the tokens of a command, without comments and the blanks between words.

    A quote that is never closed is left out, and a substitution that is never closed extends to the end. With
    `strict`, both raise ShellSyntaxError.
    """
    at = 0
    delimiters: list[str] = []  # of the here-documents that begin after the next line break
    announced = False  # the last token was `<<`: the next word is a delimiter
    while at < len(text):
        match = _TOKEN.match(text, at)
        kind = match.lastgroup if match is not None else "word"
        if match is not None and kind != "simple":
            at = match.end()
            if kind in ("blank", "comment"):
                continue
            raw = match[0]
            announced = raw.lstrip("0123456789") in ("<<", "<<-")
            yield ShellToken("redirect" if kind == "redirect" else "operator", raw, raw, at)
            if raw == "\n":
                for delimiter in delimiters:
                    body, end = _document(text, at, delimiter)
                    yield ShellToken("document", text[at:end], body, end)
                    at = end
                delimiters.clear()
            continue
        if match is not None:
            raw, at = match[0], match.end()
            word = ShellToken("word", raw, raw, at, _LITERAL.fullmatch(raw) is not None)
        else:
            word = _word(text, at, strict)
            at = word.end
        if announced:
            delimiters.append(word.value)
            announced = False
        yield word


def command_text(arguments: Sequence[str]) -> str:
    """Return a command given as a list of words as one text; for `["bash", "-c", TEXT]` and similar, TEXT."""
    if len(arguments) == 3 and arguments[0].rpartition("/")[2] in _SHELLS and arguments[1] in _COMMAND_FLAGS:
        return arguments[2]
    return shlex.join(arguments)


def _document(text: str, at: int, delimiter: str) -> tuple[str, int]:
    """Return the lines of a here-document that begins at `at`, and the position after its delimiter."""
    begin = at
    while at < len(text):
        line_end = text.find("\n", at)
        line_end = len(text) if line_end < 0 else line_end
        if text[at:line_end].strip("\t \r") == delimiter:
            return text[begin:at], min(line_end + 1, len(text))
        at = line_end + 1
    return text[begin:], len(text)


def _word(text: str, begin: int, strict: bool) -> ShellToken:
    at, parts, literal = begin, list[str](), True
    substitutions: list[str] = []
    while at < len(text):
        character = text[at]
        if plain := _PLAIN.match(text, at):
            parts.append(plain[0])
            literal = literal and _LITERAL.fullmatch(plain[0]) is not None
            at = plain.end()
        elif character == "'":
            end = text.find("'", at + 1)
            if end < 0:
                if strict:
                    raise ShellSyntaxError("expected a closing single quote; add it")
                end = at
            else:
                parts.append(text[at + 1 : end])
            at = end + 1
        elif character == '"':
            end = _quote_end(text, at, strict)
            inner = text[at + 1 : end - 1]
            literal = literal and not any(sign in inner for sign in "$`!")
            parts.append(_ESCAPED.sub(lambda match: match[1].strip("\n"), inner))
            at = end
        elif character == "\\":
            if strict and at + 1 >= len(text):
                raise ShellSyntaxError(
                    "expected a character after the last backslash; add it, or remove the backslash"
                )
            parts.append(text[at + 1 : at + 2].strip("\n") if at + 1 < len(text) else character)
            at += 2
        elif character in "$`":
            literal = False
            try:
                end = _substitution_end(text, at, 0)
            except ShellSyntaxError:
                if strict:
                    raise
                end = len(text)
            if character == "`":
                substitutions.append(text[at + 1 : end].removesuffix("`"))
            elif text.startswith("(", at + 1):
                substitutions.append(text[at + 2 : end].removesuffix(")"))
            parts.append(text[at:end])
            at = end
        else:
            break
    at = min(at, len(text))
    return ShellToken("word", text[begin:at], "".join(parts), at, literal, tuple(substitutions))


def _quote_end(text: str, at: int, strict: bool) -> int:
    """Return the position after the text in the double quotes at `at`, or after the quote if it is never
    closed.
    """
    try:
        return _closing_quote(text, at, 0)
    except ShellSyntaxError:
        if strict:
            raise
    simple = _QUOTED.match(text, at)
    return simple.end() if simple is not None else at + 1


def _closing_quote(text: str, at: int, depth: int) -> int:
    """Return the position after the double quote that closes the one at `at`."""
    at += 1
    while at < len(text):
        character = text[at]
        if character == '"':
            return at + 1
        if character == "\\":
            at += 2
        elif character in "$`":
            at = _substitution_end(text, at, depth + 1)
        else:
            at += 1
    raise ShellSyntaxError("expected a closing double quote; add it")


def _substitution_end(text: str, at: int, depth: int) -> int:
    """Return the position after the substitution that begins at `at`; a lone dollar is one character."""
    if depth > _MAX_NESTING:
        raise ShellSyntaxError(
            f"more than {_MAX_NESTING} quotes and substitutions are nested, the maximum; use fewer"
        )
    if text[at] == "`":
        return _escaped_end(text, at + 1, "`")
    opening = text[at + 1 : at + 2]
    if opening == "'":
        return _escaped_end(text, at + 2, "'")
    closing = {"(": ")", "{": "}"}.get(opening)
    if closing is None:
        return at + 1
    at += 2
    level = 1
    while at < len(text):
        character = text[at]
        if character == "\\":
            at += 2
        elif character == "'":
            end = text.find("'", at + 1)
            if end < 0:
                raise ShellSyntaxError("expected a closing single quote; add it")
            at = end + 1
        elif character == '"':
            at = _closing_quote(text, at, depth + 1)
        elif character in "$`":
            at = _substitution_end(text, at, depth + 1)
        else:
            level += (character == opening) - (character == closing)
            at += 1
            if not level:
                return at
    raise ShellSyntaxError(f"expected the end of `${opening}`; close it")


def _escaped_end(text: str, at: int, closing: str) -> int:
    """Return the position after the next `closing` that is not preceded by a backslash."""
    while at < len(text) and text[at] != closing:
        at += 2 if text[at] == "\\" else 1
    if at >= len(text):
        raise ShellSyntaxError(f"expected a closing {closing}; add it")
    return at + 1
