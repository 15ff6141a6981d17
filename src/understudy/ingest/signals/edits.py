"""Tracks edits of files by every agent's tools, and which of them still exist at the end of a conversation.

An edit is the lines that it removed and added. It survives while at least half of the added lines do.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from msgspec import Struct, field

from understudy.ingest.json_values import first_string, items, mapping
from understudy.ingest.signals.calls import LoggedCall, ShellCommand

LineCounts = Counter[str]

_FILE_HEADER = re.compile(r"^\*\*\* (Add|Update|Delete) File: ([^\n]{1,4096})$|^\*\*\* Move to: ([^\n]{1,4096})$")
_BLOCK_START = re.compile(r"^(?:[-<]{3,12} SEARCH>?|<{5,12})(?:\s.*)?$")
_BLOCK_DIVIDER = re.compile(r"^={5,12}$")
_BLOCK_END = re.compile(r"^(?:[+>]{3,12} REPLACE>?|>{5,12})(?:\s.*)?$")
_NUMBERED = re.compile(r"^:(?:start_line|end_line):")


class FileChange(Struct):
    """What a call did to one file. `removed` and `added` count its lines, without indentation.

    `replaces_file`: the file now consists of the added lines. `is_deleted`: it was deleted. `is_opaque`: the log
    does not show what was changed. `ends`: the first and last removed line, which may be partial lines.
    """

    path: str
    removed: LineCounts = field(default_factory=Counter[str])
    added: LineCounts = field(default_factory=Counter[str])
    replaces_file: bool = False
    is_deleted: bool = False
    is_opaque: bool = False
    ends: tuple[str, ...] = ()


def file_changes(call: LoggedCall) -> list[FileChange]:
    """Return the file changes that a call requested; empty if it is not an editing tool."""
    reader = _READERS_BY_TOOL.get(call.name.lower().rpartition("__")[2])
    if reader is not None:
        return reader(call.arguments)
    if "apply_patch" in str(call.arguments.get("command") or call.arguments.get("cmd") or "")[:4_000]:
        for command in call.shell():
            if command.program in ("apply_patch", "applypatch"):
                return _read_codex_patch(command.argv[1] if len(command.argv) > 1 else command.body)
    return []


def _lines(text: Any) -> list[str]:
    return [line for raw in text.split("\n") if (line := raw.strip())] if isinstance(text, str) else []


def _replacement(path: str, old: Any, new: Any) -> FileChange:
    old_lines, new_lines = _lines(old), _lines(new)
    removed, added = Counter(old_lines), Counter(new_lines)
    ends = (old_lines[0], old_lines[-1]) if old_lines else ()
    return FileChange(path, removed - added, added - removed, ends=tuple(end for end in ends if end not in added))


def _joined_changes(path: str, changes: list[FileChange]) -> list[FileChange]:
    if not changes:
        return []
    joined = FileChange(path)
    for change in changes:
        # A later part may remove lines that an earlier part added.
        remaining = joined.added - change.removed
        joined.removed += change.removed - joined.added
        joined.added = remaining + change.added
        joined.ends += change.ends
        joined.is_opaque = joined.is_opaque or change.is_opaque
    return [joined]


_PATHS = ("file_path", "path", "notebook_path", "filePath", "target_file", "filename", "absolute_path")


def _path(arguments: dict[str, Any]) -> str:
    return first_string(arguments, *_PATHS) or ""


def _opaque_change(arguments: dict[str, Any]) -> list[FileChange]:
    return [FileChange(_path(arguments), is_opaque=True)]


def _written_change(path: str, content: Any, *, replaces_file: bool = True) -> list[FileChange]:
    """Return the change that writes a file (or, without `replaces_file`, inserts a part).

    Opaque if `content` is not a string.
    """
    if not isinstance(content, str):
        return [FileChange(path, is_opaque=True)]
    return [FileChange(path, added=Counter(_lines(content)), replaces_file=replaces_file)]


def _read_edit(arguments: dict[str, Any]) -> list[FileChange]:
    old = arguments.get("old_string", arguments.get("old_str", arguments.get("oldString")))
    new = arguments.get("new_string", arguments.get("new_str", arguments.get("newString")))
    if old is None and new is None:
        return _opaque_change(arguments)
    if old == "":
        return [FileChange(_path(arguments), added=Counter(_lines(new)), replaces_file=True)]
    return [_replacement(_path(arguments), old, new)]


def _read_multi_edit(arguments: dict[str, Any]) -> list[FileChange]:
    path = _path(arguments)
    changes = [_read_edit({**mapping(edit), "file_path": path})[0] for edit in items(arguments.get("edits"))]
    return _joined_changes(path, changes) or _opaque_change(arguments)


def _read_write(arguments: dict[str, Any]) -> list[FileChange]:
    content = arguments.get("content", arguments.get("file_text", arguments.get("contents")))
    return _written_change(_path(arguments), content)


def _read_notebook_edit(arguments: dict[str, Any]) -> list[FileChange]:
    path = f"{_path(arguments)}#{arguments.get('cell_id') or arguments.get('cell_number') or ''}"
    mode = arguments.get("edit_mode")
    if mode == "delete":
        return [FileChange(path, is_deleted=True)]
    return _written_change(path, arguments.get("new_source"), replaces_file=mode != "insert")


def _read_text_editor(arguments: dict[str, Any]) -> list[FileChange]:
    """Read a call of Anthropic's text editor tool, which many agents offer under their own name."""
    command, path = arguments.get("command"), _path(arguments)
    if command == "create":
        return _read_write(arguments)
    if command == "str_replace":
        return [_replacement(path, arguments.get("old_str"), arguments.get("new_str"))]
    if command == "insert":
        inserted_text = arguments.get("new_str", arguments.get("insert_text"))
        return [FileChange(path, added=Counter(_lines(inserted_text)))]
    return _opaque_change(arguments) if command == "undo_edit" else []


def _read_insert(arguments: dict[str, Any]) -> list[FileChange]:
    return _written_change(_path(arguments), arguments.get("content", arguments.get("text")), replaces_file=False)


def _read_search_replace_blocks(arguments: dict[str, Any]) -> list[FileChange]:
    """Read a diff made of SEARCH and REPLACE blocks."""
    path = _path(arguments)
    diff = arguments.get("diff")
    if not isinstance(diff, str):
        return _opaque_change(arguments)
    changes: list[FileChange] = []
    old: list[str] = []
    new: list[str] = []
    side: list[str] | None = None
    for line in diff.split("\n"):
        if side is None:
            if _BLOCK_START.match(line):
                old, new = [], []
                side = old
        elif side is old and _BLOCK_DIVIDER.match(line):
            side = new
        elif side is new and _BLOCK_END.match(line):
            changes.append(_replacement(path, "\n".join(old), "\n".join(new)))
            side = None
        elif not _NUMBERED.match(line) and line != "-------":
            side.append(line)
    return _joined_changes(path, changes) or _opaque_change(arguments)


def _read_patch_call(arguments: dict[str, Any]) -> list[FileChange]:
    if patch := first_string(arguments, "input", "patch", "patch_text", "patchText"):
        return _read_codex_patch(patch)
    command = items(arguments.get("command"))
    return _read_codex_patch(str(command[1])) if len(command) > 1 else []


def _read_codex_patch(text: str) -> list[FileChange]:
    """Return the changes in a patch of Codex's format, one for each file."""
    changes: list[FileChange] = []
    removed: list[str] = []
    added: list[str] = []

    def close() -> None:
        if changes:
            change = _replacement(changes[-1].path, "\n".join(removed), "\n".join(added))
            changes[-1].removed, changes[-1].added = change.removed, change.added
        removed.clear()
        added.clear()

    for line in text.split("\n"):
        header = _FILE_HEADER.match(line.rstrip("\r")) if line.startswith("*** ") else None
        if header is not None and not header[3]:
            close()
            changes.append(
                FileChange(header[2].strip(), replaces_file=header[1] == "Add", is_deleted=header[1] == "Delete")
            )
        elif header is not None and changes:
            changes[-1].path = header[3].strip()  # the patch also renames the file
        elif line[:1] == "-":
            removed.append(line[1:])
        elif line[:1] == "+":
            added.append(line[1:])
    close()
    return changes


_READERS_BY_TOOL = {
    name: reader
    for reader, names in (
        (_read_edit, "edit replace str_replace"),
        (_read_multi_edit, "multiedit"),
        (_read_write, "write write_file write_to_file new_file create_file create"),
        (_read_notebook_edit, "notebookedit"),
        (_read_text_editor, "str_replace_editor str_replace_based_edit_tool file_editor"),
        (_read_search_replace_blocks, "replace_in_file apply_diff"),
        (_read_insert, "insert_content"),
        (_read_patch_call, "apply_patch"),
        (_opaque_change, "search_and_replace search_replace edit_file insert"),
    )
    for name in names.split()
}

_EDGE_LINES = 100
"""How many first and last lines of a file's edits are remembered, to recognise edits of partial lines."""
_DELETIONS = 8
"""How many line-removing edits of a file are remembered, to recognise when they are undone."""
_MIN_PART_CHARS = 4
_MAX_PART_CHARS = 2_000

_FILE_NAMES = re.compile(r"[\w.+-]{1,200}\.\w{1,12}|(?:Makefile|Dockerfile)")
_WRITING_CALLS = ("write", "open(", "replace(", "dump(", "unlink", "rename(", "save")

# Programs that change the files named as arguments.
_CHANGING_PROGRAMS = frozenset((
    "mv", "cp", "tee", "truncate", "patch", "install", "rsync", "ln", "ed", "ex", "dd", "shred", "unlink",
    "sponge",
))  # fmt: skip
_REMOVING_PROGRAMS = frozenset(["rm", "unlink", "trash", "del"])
_IN_PLACE_EDITORS = frozenset(["sed", "gsed", "perl", "awk", "gawk", "ruby", "yq"])
_SCRIPT_INTERPRETERS = re.compile(r"(?:python|pypy|py|node|ruby|perl|php|deno|bun)[\d.]*(?:\.exe)?")
_GIT_RESTORING = frozenset(("checkout", "restore"))
_LEADING_DOTS = re.compile(r"^(?:\./)+")


CHANGING = re.compile(
    r"\b(?:mv|cp|tee|rm|sed|perl|awk|gawk|yq|git|patch|install|rsync|ln|ed|ex|dd|truncate|shred|unlink|sponge|trash|del"
    r"|python[\d.]*|node|ruby|php|deno|bun|pypy|py)\b|(?<![\d&])>(?!&)"
)
"""Matches every command that may change a file; other commands need not be parsed."""


class TrackedEdit(Struct):
    """An edit of one file. `added_lines` counts the lines that it added, `remaining_lines` those that still exist.

    `removed_lines` are those of an edit that added none. `unknown`: it cannot be known whether it survived.
    `age` is the number of commits made before it.
    """

    path: str
    added_lines: int = 0
    remaining_lines: int = 0
    removed_lines: LineCounts | None = None
    undone: bool = False
    unknown: bool = False
    age: int = 0

    @property
    def survived(self) -> bool | None:
        """Whether at least half of the added lines still exist, or None if unknown."""
        if self.unknown:
            return None
        return not self.undone and self.remaining_lines * 2 >= self.added_lines


class _TrackedFile(Struct):
    """The edits of a file, and for each line the edits that added it, the newest last.

    `edges` are the first and last lines of the latest edits, `deletions` the edits that only removed lines.
    """

    edits: list[TrackedEdit]
    owners: dict[str, list[TrackedEdit]]
    edges: deque[tuple[str, TrackedEdit]]
    deletions: list[TrackedEdit]


class FileTracker:
    """The edited files of a conversation. Its edits and commands are applied in order."""

    def __init__(self) -> None:
        self._files: dict[str, _TrackedFile] = {}
        self._named: dict[str, list[str]] = {}
        self._commits = 0

    def apply(self, change: FileChange) -> TrackedEdit:
        """Apply a change. Returns the edit, which later changes update."""
        path = _normalised_path(change.path)
        file = self._files.get(path)
        if file is None:
            file = self._files[path] = _TrackedFile([], {}, deque(maxlen=_EDGE_LINES), [])
            self._named.setdefault(path.rpartition("/")[2].partition("#")[0], []).append(path)
        edit = TrackedEdit(path, unknown=change.is_opaque or not path, age=self._commits)
        if change.is_opaque:
            self._doubt(file)
        elif change.is_deleted:
            self._forget(file)
        elif change.replaces_file:
            self._overwrite(file, change.added)
        else:
            self._remove_lines(file, change)
        self._add_lines(file, edit, change)
        file.edits.append(edit)
        return edit

    def run_command(self, command: ShellCommand) -> None:
        """Apply what a shell command may have done to edited files."""
        if not self._files or not (command.argv or command.writes):
            return
        program, arguments = command.program, command.argv[1:]
        if program == "git":
            self._git([word for word in arguments if not word.startswith("-")], arguments)
        elif program in _REMOVING_PROGRAMS:
            for path in self._matching(arguments):
                self._forget(self._files[path])
        elif program in _CHANGING_PROGRAMS:
            # The source of a copy or link stays as it is, so only the target is in doubt.
            self._doubt_named(arguments[-1:] if program in ("cp", "install", "rsync", "ln") else arguments)
        elif program in _IN_PLACE_EDITORS and any(word.startswith("-") and "i" in word for word in arguments):
            self._doubt_named(arguments)
        elif _SCRIPT_INTERPRETERS.fullmatch(program):
            script = command.body or next((word for flag, word in pairwise(arguments) if flag in ("-c", "-e")), "")
            if any(sign in script for sign in _WRITING_CALLS):
                self._doubt_named(_FILE_NAMES.findall(script))
        self._doubt_named(command.writes)

    @property
    def empty(self) -> bool:
        """Whether nothing was edited yet."""
        return not self._files

    def commit(self) -> None:
        """Record a commit: restoring files to it will not undo earlier edits."""
        self._commits += 1

    def _git(self, operands: Sequence[str], arguments: Sequence[str]) -> None:
        action = operands[0] if operands else ""
        if action in _GIT_RESTORING:
            if ("--staged" in arguments and "--worktree" not in arguments) or not {"-b", "-B", "-c"}.isdisjoint(
                arguments
            ):
                return
            matches = self._matching(operands[1:])
            for path in matches:
                self._reset(self._files[path])
            for word in operands[1:] if not matches else ():
                directory = f"/{_normalised_path(word).strip('/')}/"
                for path, file in self._files.items():
                    if word == "." or directory in f"/{path}":
                        self._reset(file)
        elif action == "reset" and "--hard" in arguments:
            self._doubt_all(committed=operands[1:2] not in ([], ["HEAD"]))
        elif action == "clean" or (action == "stash" and (operands[1:2] or ["push"])[0] in ("push", "save")):
            self._doubt_all(committed=False)
        elif action == "revert" or (action == "apply" and not {"-R", "--reverse"}.isdisjoint(arguments)):
            self._doubt_all(committed=True)
        elif action == "rm" and "--cached" not in arguments:
            for path in self._matching(operands[1:]):
                self._forget(self._files[path])
        elif action == "mv":
            self._doubt_named(operands[1:])

    def _matching(self, names: Sequence[str]) -> list[str]:
        """Return the edited files that one of these arguments names."""
        return [
            path
            for name in map(_normalised_path, names)
            for path in self._named.get(name.rpartition("/")[2], ())
            if name in (path, path.rpartition("/")[2])
            or path.endswith(f"/{name.lstrip('/')}")
            or name.endswith(f"/{path.lstrip('/')}")
        ]

    def _doubt_named(self, names: Sequence[str]) -> None:
        for path in self._matching(names):
            self._doubt(self._files[path])

    def _doubt(self, file: _TrackedFile) -> None:
        for edit in file.edits:
            edit.unknown = edit.unknown or not edit.undone
        self._clear(file)

    def _doubt_all(self, *, committed: bool) -> None:
        """Mark all edits as unknown, or, without `committed`, only those made since the last commit."""
        for file in self._files.values():
            committed_before = [edit for edit in file.edits if not committed and edit.age < self._commits]
            for edit in file.edits:
                edit.unknown = edit.unknown or (not edit.undone and (committed or edit.age == self._commits))
            if not committed_before:
                self._clear(file)

    def _forget(self, file: _TrackedFile) -> None:
        """Mark all edits of a file as undone, because it was deleted or restored."""
        for edit in file.edits:
            edit.undone, edit.unknown = True, False
        self._clear(file)

    def _reset(self, file: _TrackedFile) -> None:
        """Mark the edits since the last commit as undone, because the file was restored to it."""
        if all(edit.age >= self._commits for edit in file.edits):
            self._forget(file)
        for edit in file.edits:
            edit.undone = edit.undone or edit.age == self._commits

    def _clear(self, file: _TrackedFile) -> None:
        # These edits cannot change any more; dropping them keeps the total work linear.
        file.edits.clear()
        file.owners.clear()
        file.edges.clear()
        file.deletions.clear()

    def _overwrite(self, file: _TrackedFile, new_lines: LineCounts) -> None:
        for line in list(file.owners):
            owners = file.owners[line]
            while len(owners) > new_lines[line]:
                owners.pop().remaining_lines -= 1
            if not owners:
                del file.owners[line]
        for edit in file.edits:
            # In an emptied file no edit survives, even one that was unknown before.
            if edit.unknown and not new_lines:
                edit.undone, edit.unknown = True, False

    def _remove_lines(self, file: _TrackedFile, change: FileChange) -> None:
        for line, count in change.removed.items():
            owners = file.owners.get(line, [])
            for _ in range(min(count, len(owners))):
                owners.pop().remaining_lines -= 1
            if not owners:
                file.owners.pop(line, None)
        for partial_line in change.ends:
            self._remove_partial_line(file, partial_line)
        if file.deletions:
            for edit in file.deletions:
                edit.undone = edit.undone or (
                    edit.removed_lines is not None and not edit.removed_lines - change.added
                )
            file.deletions = [edit for edit in file.deletions if not edit.undone]

    def _remove_partial_line(self, file: _TrackedFile, part: str) -> None:
        """Match the first or last line of a removal, which may be partial, with such lines of earlier edits."""
        if not _MIN_PART_CHARS <= len(part) <= _MAX_PART_CHARS:
            return
        for line, edit in reversed(file.edges):
            contains = part in line or (len(line) >= _MIN_PART_CHARS and line in part)
            owners = file.owners.get(line)
            if contains and line != part and owners and owners[-1] is edit:
                owners.pop()
                edit.remaining_lines -= 1
                if not owners:
                    del file.owners[line]
                return

    def _add_lines(self, file: _TrackedFile, edit: TrackedEdit, change: FileChange) -> None:
        if change.is_opaque or change.is_deleted:
            return
        if not change.added and change.removed:
            edit.removed_lines = change.removed
            file.deletions.append(edit)
            del file.deletions[:-_DELETIONS]
        for line, count in change.added.items():
            owners = file.owners.setdefault(line, [])
            new_count = max(count - len(owners), 0) if change.replaces_file else count
            owners.extend([edit] * new_count)
            edit.added_lines += new_count
            edit.remaining_lines += new_count
        if not change.replaces_file and change.added:
            added = list(change.added)
            for line in {added[0], added[-1]}:
                if len(line) <= _MAX_PART_CHARS:
                    file.edges.append((line, edit))


def _normalised_path(path: str) -> str:
    return _LEADING_DOTS.sub("", path.replace("\\", "/"))


def count_survived(edits: Sequence[TrackedEdit]) -> int | None:
    """Return how many edits survived, or None if this is unknown for one of them."""
    survived = [edit.survived for edit in edits]
    return None if None in survived else sum(map(bool, survived))
