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
        edits = _ScriptReader(script).operands()
    except ValueError:
        return script
    for part in sorted(edits, key=lambda span: span.start, reverse=True):
        joined = f'"$(set -- {script[part]}; printf %s "$*")"'
        script = script[: part.start] + joined + script[part.stop :]
    return script


class _ScriptReader:
    def __init__(self, script: str) -> None:
        self._script = script

    def operands(self) -> list[slice]:
        """Return the expansions to join; those within others are left alone. Raises ValueError."""
        script, position, edits = self._script, 0, list[slice]()
        starts_command, test = True, ""
        here_documents: list[tuple[str, str]] = []
        while position < len(script):
            character = script[position]
            if character == "#":
                position = self._line_end(position)
            elif character in _BLANKS or script.startswith("\\\n", position):
                position += 2 if character == "\\" else 1
            elif character == "\n" and here_documents:
                position = self._end_of_texts(position + 1, here_documents)
                here_documents, starts_command, test = [], True, ""
            elif character in _SEPARATORS:
                starts_command, test, position = True, "", position + 1
            elif script.startswith("<<", position) and not script.startswith("<<<", position):
                match = _DELIMITER.match(script, position)
                if match is None:
                    raise ValueError(f"expected a delimiter of a here-document after character {position}")
                here_documents.append((match[1], match[2] or match[3] or match[4]))
                position = match.end()
            elif character in "<>":
                position += 1
            else:
                word = self._word(position)
                text, position = script[position : word.end], word.end
                if test:
                    edits += word.split
                    test = "" if test == "[" and text == "]" else test
                elif starts_command and not _ASSIGNMENT.match(text):
                    test = text if text in ("[", "test") else ""
                    starts_command = text in _BEFORE_COMMANDS
        return edits

    def _line_end(self, position: int) -> int:
        end = self._script.find("\n", position)
        return len(self._script) if end < 0 else end

    def _end_of_texts(self, position: int, documents: list[tuple[str, str]]) -> int:
        for tabs, delimiter in documents:
            indent = "\t*" if tabs else ""
            end = re.compile(rf"^{indent}{re.escape(delimiter)}$", re.MULTILINE).search(self._script, position)
            if end is None:
                raise ValueError(f"expected the line {delimiter!r}, the end of a here-document")
            position = min(end.end() + 1, len(self._script))
        return position

    def _word(self, position: int) -> _Word:
        script, word = self._script, _Word(position, [])
        while word.end < len(script) and script[word.end] not in _WORD_ENDS:
            begin = word.end
            word.end = self._part_end(begin)
            is_expansion = script[begin] == "`" or (
                script[begin] == "$" and script[begin + 1 : begin + 2] not in "'\""
            )
            if is_expansion and (word.end - begin > 2 or _VARIABLE.fullmatch(script, begin, word.end)):
                word.split.append(slice(begin, word.end))
        return word

    def _part_end(self, position: int) -> int:
        """Return the end of a character, a quoted text or an expansion."""
        script = self._script
        match script[position]:
            case "\\":
                return position + 2
            case "'":
                return self._index("'", position + 1) + 1
            case '"':
                return self._quote_end(position + 1)
            case "`":
                return self._backquote_end(position + 1)
            case "$" if script.startswith(("$(", "${"), position):
                return self._bracket_end(position + 1)
            case "$" if variable := _VARIABLE.match(script, position):
                return variable.end()
            case _:
                return position + 1

    def _index(self, text: str, position: int) -> int:
        end = self._script.find(text, position)
        if end < 0:
            raise ValueError(f"expected {text} after character {position}")
        return end

    def _quote_end(self, position: int) -> int:
        while position < len(self._script) and self._script[position] != '"':
            position = position + 1 if self._script[position] == "'" else self._part_end(position)
        return self._index('"', position) + 1

    def _backquote_end(self, position: int) -> int:
        while position < len(self._script) and self._script[position] != "`":
            position += 2 if self._script[position] == "\\" else 1
        return self._index("`", position) + 1

    def _bracket_end(self, position: int) -> int:
        """Return the end of a substitution or parameter that begins with this bracket.

        A `case` in one has brackets that are not closed; then what follows cannot be read or is left alone.
        """
        opening = self._script[position]
        closing, position = _CLOSING[opening], position + 1
        while position < len(self._script) and self._script[position] != closing:
            character = self._script[position]
            if character == "#" and self._script[position - 1] in " \t\n;":
                position = self._line_end(position)
            else:
                position = self._bracket_end(position) if character == opening else self._part_end(position)
        return self._index(closing, position) + 1
