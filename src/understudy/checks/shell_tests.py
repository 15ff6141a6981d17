"""Makes what a tested program prints one operand of the `[` and `test` of a check script.

In `[ $(app) = 42 ]` the shell makes a word of each word that the program prints, and each is an operand or an
operator: a program that prints `1 -o 1` passes whatever is expected of it. Here such an expansion is joined to one
word, and everything else of the script stays as it is. A shell script is read only as far as this needs; one that
cannot be read is left unchanged. Nothing here runs code.
"""

from __future__ import annotations

import re
from pathlib import Path

from msgspec import Struct

_SEPARATORS = frozenset(";&|(){}\n")
_BLANKS = frozenset(" \t")
_WORD_ENDS = frozenset(" \t\n;&|()<>")
_BEFORE_COMMANDS = frozenset({"if", "elif", "while", "until", "then", "else", "do", "!", "time", "{"})
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")
_VARIABLE = re.compile(r"\$(?:[A-Za-z_]\w*|[0-9@*])")
_DELIMITER = re.compile(r"<<(-?)[ \t]*(?:'([^'\n]+)'|\"([^\"\n]+)\"|\\?([\w.]+))")
_SHEBANG = re.compile(rb"#![^\n]*\b(?:ba|da)?sh\b")
_CLOSING = {"(": ")", "{": "}"}


class _Word(Struct):
    """A word of a command: where it ends, and its parts that the shell splits into words."""

    end: int
    split: list[slice]


def is_shell_script(path: Path, content: bytes) -> bool:
    """Return whether a file is a script for sh, bash or dash, by its name or its first line."""
    return path.suffix in (".sh", ".bash") or _SHEBANG.match(content) is not None


def with_one_word_operands(script: str) -> str:
    """Return a shell script in which every expansion within `[ … ]` and `test …` is one operand."""
    try:
        edits = _Reader(script).operands()
    except ValueError:
        return script
    for part in sorted(edits, key=lambda each: each.start, reverse=True):
        joined = f'"$(set -- {script[part]}; printf %s "$*")"'
        script = script[: part.start] + joined + script[part.stop :]
    return script


class _Reader:
    def __init__(self, script: str) -> None:
        self._script = script

    def operands(self) -> list[slice]:
        """Return the expansions to join; those within others are left alone. Raises ValueError."""
        script, at, edits = self._script, 0, list[slice]()
        starts_command, test = True, ""
        here_documents: list[tuple[str, str]] = []
        while at < len(script):
            character = script[at]
            if character == "#":
                at = self._line_end(at)
            elif character in _BLANKS or script.startswith("\\\n", at):
                at += 2 if character == "\\" else 1
            elif character == "\n" and here_documents:
                at = self._after_texts(at + 1, here_documents)
                here_documents, starts_command, test = [], True, ""
            elif character in _SEPARATORS:
                starts_command, test, at = True, "", at + 1
            elif script.startswith("<<", at) and not script.startswith("<<<", at):
                match = _DELIMITER.match(script, at)
                if match is None:
                    raise ValueError("a here-document without a delimiter")
                here_documents.append((match[1], match[2] or match[3] or match[4]))
                at = match.end()
            elif character in "<>":
                at += 1
            else:
                word = self._word(at)
                text, at = script[at : word.end], word.end
                if test:
                    edits += word.split
                    test = "" if test == "[" and text == "]" else test
                elif starts_command and not _ASSIGNMENT.match(text):
                    test = text if text in ("[", "test") else ""
                    starts_command = text in _BEFORE_COMMANDS
        return edits

    def _line_end(self, at: int) -> int:
        end = self._script.find("\n", at)
        return len(self._script) if end < 0 else end

    def _after_texts(self, at: int, documents: list[tuple[str, str]]) -> int:
        for tabs, delimiter in documents:
            indent = "\t*" if tabs else ""
            end = re.compile(rf"^{indent}{re.escape(delimiter)}$", re.MULTILINE).search(self._script, at)
            if end is None:
                raise ValueError("a here-document without an end")
            at = min(end.end() + 1, len(self._script))
        return at

    def _word(self, at: int) -> _Word:
        script, word = self._script, _Word(at, [])
        while word.end < len(script) and script[word.end] not in _WORD_ENDS:
            begin = word.end
            word.end = self._part(begin)
            is_expansion = script[begin] == "`" or (
                script[begin] == "$" and script[begin + 1 : begin + 2] not in "'\""
            )
            if is_expansion and (word.end - begin > 2 or _VARIABLE.fullmatch(script, begin, word.end)):
                word.split.append(slice(begin, word.end))
        return word

    def _part(self, at: int) -> int:
        """Return the end of a character, a quoted text or an expansion."""
        script = self._script
        match script[at]:
            case "\\":
                return at + 2
            case "'":
                return self._index("'", at + 1) + 1
            case '"':
                return self._quoted(at + 1)
            case "`":
                return self._backquoted(at + 1)
            case "$" if script.startswith(("$(", "${"), at):
                return self._balanced(at + 1)
            case "$" if variable := _VARIABLE.match(script, at):
                return variable.end()
            case _:
                return at + 1

    def _index(self, text: str, at: int) -> int:
        end = self._script.find(text, at)
        if end < 0:
            raise ValueError(f"expected {text} after character {at}")
        return end

    def _quoted(self, at: int) -> int:
        while at < len(self._script) and self._script[at] != '"':
            at = at + 1 if self._script[at] == "'" else self._part(at)
        return self._index('"', at) + 1

    def _backquoted(self, at: int) -> int:
        while at < len(self._script) and self._script[at] != "`":
            at += 2 if self._script[at] == "\\" else 1
        return self._index("`", at) + 1

    def _balanced(self, at: int) -> int:
        """Return the end of a substitution or parameter that begins with this bracket.

        A `case` in one has brackets that are not closed; then what follows cannot be read or is left alone.
        """
        opening = self._script[at]
        closing, at = _CLOSING[opening], at + 1
        while at < len(self._script) and self._script[at] != closing:
            character = self._script[at]
            if character == "#" and self._script[at - 1] in " \t\n;":
                at = self._line_end(at)
            else:
                at = self._balanced(at) if character == opening else self._part(at)
        return self._index(closing, at) + 1
