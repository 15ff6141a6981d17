"""Splits a unified diff into changes that an agent can make with its tools, one after another."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from msgspec import Struct, structs

from understudy.util.diffs import NO_NEWLINE, DiffError, FileDiff, Hunk, parse_diff


class Edit(Struct, frozen=True):
    """A replacement of lines in a file.

    `line` is the number of its first line, counted from 1 in the file after the earlier changes. Each of `lines`
    is (" ", "-" or "+", text with its newline, if it has one).
    """

    path: str
    line: int
    lines: tuple[tuple[str, str], ...]

    @property
    def old(self) -> str:
        """Return the text that is replaced, with context."""
        return "".join(text for tag, text in self.lines if tag != "+")

    @property
    def new(self) -> str:
        """Return the text that replaces it, with context."""
        return "".join(text for tag, text in self.lines if tag != "-")

    @property
    def patch(self) -> str:
        """Return the change as a unified diff."""
        sizes = [sum(tag != other_tag for tag, _ in self.lines) for other_tag in ("+", "-")]
        starts = [self.line if size else self.line - 1 for size in sizes]
        body = "".join(
            f"{tag}{text}" if text.endswith("\n") else f"{tag}{text}\n{NO_NEWLINE}\n" for tag, text in self.lines
        )
        span = f"@@ -{starts[0]},{sizes[0]} +{starts[1]},{sizes[1]} @@\n"
        # Without git's own header, git would take an emptied file for a deleted one.
        header = f"diff --git a/{self.path} b/{self.path}\n--- a/{self.path}\n+++ b/{self.path}\n"
        return f"{header}{span}{body}"


class Write(Struct, frozen=True):
    """A new file."""

    path: str
    content: str

    @property
    def patch(self) -> str:
        """Return the change as a unified diff."""
        lines = [line for line in re.split(r"(?<=\n)", self.content) if line]
        edit = Edit(self.path, 1, tuple(("+", line) for line in lines))
        return edit.patch.replace(f"\n--- a/{self.path}\n", "\nnew file mode 100644\n--- /dev/null\n", 1)


class Remove(Struct, frozen=True):
    """A deleted file. `patch` is its part of the diff."""

    path: str
    patch: str


class Apply(Struct, frozen=True):
    """A change that no editing tool can make exactly, so the diff itself is applied."""

    patch: str


Change = Edit | Write | Remove | Apply


def read_changes(patch: str) -> list[Change]:
    """Return the changes of a unified diff, in order. A diff that cannot be split is one `Apply`."""
    try:
        files = parse_diff(patch.encode(errors="surrogateescape"))
        if files and not any(file.is_binary or _changes_mode(file) for file in files):
            return [change for file in files for change in _file_changes(file)]
    except DiffError:
        pass
    return [Apply(patch)] if patch.strip() else []


def wrong_changes(changes: list[Change]) -> list[Change]:
    """Return a change at the right place that fixes nothing: a comment before the first line to change."""
    for change in changes:
        if isinstance(change, Edit):
            first = next((index for index, (tag, _) in enumerate(change.lines) if tag != " "), 0)
            context = [(" ", text) for tag, text in change.lines if tag != "+"]
            nearby_line = context[min(first, len(context) - 1)][1] if context else ""
            indent = nearby_line[: len(nearby_line) - len(nearby_line.lstrip())].rstrip("\r\n")
            context.insert(first, ("+", f"{indent}{_comment(change.path, 'Checked: this is as it should be.')}\n"))
            return [structs.replace(change, lines=tuple(context))]
    for change in changes:
        if isinstance(change, Write):
            return [Write(change.path, _comment(change.path, "To be written.") + "\n")]
    return [Write("NOTES.txt", "Looked at the task; nothing was changed.\n")]


def _comment(path: str, text: str) -> str:
    styles = {
        "// {}": {
            ".c",
            ".cc",
            ".cpp",
            ".cs",
            ".go",
            ".h",
            ".java",
            ".js",
            ".jsx",
            ".kt",
            ".rs",
            ".swift",
            ".ts",
            ".tsx",
        },
        "<!-- {} -->": {".html", ".md", ".xml", ".svg"},
    }
    suffix = PurePosixPath(path).suffix.lower()
    style = next((style for style, suffixes in styles.items() if suffix in suffixes), "# {}")
    return style.format(text)


def _changes_mode(file: FileDiff) -> bool:
    """Return whether the file's mode matters: it changes, or a new file is not an ordinary one."""
    modes = [line for line in file.header if line.startswith((b"old mode", b"new mode", b"new file mode"))]
    return any(line.rstrip() != b"new file mode 100644" for line in modes)


def _file_changes(file: FileDiff) -> list[Change]:
    """Return the changes of one file. Raises DiffError for a line that git never writes."""
    text = _decode(file.text)
    path = _decode(file.new_path or file.old_path or min(file.paths))
    if file.new_path is None:
        return [Remove(path, text)]
    edits: list[Edit] = []
    shift = 0
    for hunk in file.hunks:
        # For a side without lines, git gives the line before the change, so the added line is the next one.
        edits.append(Edit(path, hunk.old_start + (hunk.old_count == 0) + shift, _hunk_lines(hunk)))
        shift += hunk.new_count - hunk.old_count
    if file.old_path is None:
        content = "".join(edit.new for edit in edits)
        exact = content and all(line == line.rstrip() for line in content.split("\n"))
        return [Write(path, content)] if exact else [Apply(text)]
    if file.old_path != file.new_path or not edits or not all(_editable(edit) for edit in edits):
        return [Apply(text)]
    return list(edits)


def _hunk_lines(hunk: Hunk) -> tuple[tuple[str, str], ...]:
    lines: list[tuple[str, str]] = []
    for line in hunk.lines:
        sign, text = line[:1].decode() or " ", _decode(line[1:])
        if sign == "\\":
            tag, last_line = lines[-1]
            lines[-1] = (tag, last_line.removesuffix("\n"))
        elif sign == "\t":
            raise DiffError(f"expected a line of a hunk, which starts with a space, + or -, got {line[:80]!r}")
        else:
            lines.append((sign, text + "\n"))
    return tuple(lines)


def _decode(data: bytes) -> str:
    return data.decode(errors="surrogateescape")


def _editable(edit: Edit) -> bool:
    """Return whether an editing tool can make exactly this change; such tools keep line ends and trim the lines
    they write.
    """
    ends = {text[-2:] == "\r\n" for _, text in edit.lines if text.endswith("\n")}
    texts = [text.removesuffix("\n").removesuffix("\r") for _, text in edit.lines]
    return (
        len(ends) < 2
        and not any("\r" in text or "\0" in text for text in texts)
        and not any(text != text.rstrip() for text, (tag, _) in zip(texts, edit.lines, strict=True) if tag != "-")
    )
