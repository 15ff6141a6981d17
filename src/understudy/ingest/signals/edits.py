"""Edits of files by the tools of every program, each as the lines that it removed and added."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from understudy.ingest.log_reader import items, mapping, string
from understudy.ingest.signals.calls import LoggedCall

LineCounts = Counter[str]

_HUNK = re.compile(r"^\*\*\* (Add|Update|Delete) File: ([^\n]{1,4096})$|^\*\*\* Move to: ([^\n]{1,4096})$")
_SEARCH = re.compile(r"^(?:[-<]{3,12} SEARCH>?|<{5,12})(?:\s.*)?$")
_DIVIDE = re.compile(r"^={5,12}$")
_REPLACE = re.compile(r"^(?:[+>]{3,12} REPLACE>?|>{5,12})(?:\s.*)?$")
_NUMBERED = re.compile(r"^:(?:start_line|end_line):")


class FileChange(Struct):
    """What a call did to one file: `removed` and `added` count its lines, without indentation.

    `whole`: the file now has the added lines and no others. `gone`: it was deleted. `opaque`: the log does not
    show what was changed. `ends` are the first and the last of the removed lines, which may be only parts of
    lines.
    """

    path: str
    removed: LineCounts
    added: LineCounts
    whole: bool = False
    gone: bool = False
    opaque: bool = False
    ends: tuple[str, ...] = ()


def file_changes(call: LoggedCall) -> list[FileChange]:
    """The changes of files that a call requested; none where it is no editing tool."""
    reader = _TOOLS.get(call.name.lower().rpartition("__")[2])
    if reader is not None:
        return reader(call.arguments)
    if "apply_patch" in str(call.arguments.get("command") or call.arguments.get("cmd") or "")[:4_000]:
        for command in call.shell():
            if command.program in ("apply_patch", "applypatch"):
                return _patch(command.argv[1] if len(command.argv) > 1 else command.body)
    return []


def _lines(text: Any) -> list[str]:
    return [line for raw in text.split("\n") if (line := raw.strip())] if isinstance(text, str) else []


def _replaced(path: str, old: Any, new: Any) -> FileChange:
    before, after = _lines(old), _lines(new)
    removed, added = Counter(before), Counter(after)
    ends = (before[0], before[-1]) if before else ()
    return FileChange(path, removed - added, added - removed, ends=tuple(end for end in ends if end not in added))


def _joined(path: str, parts: list[FileChange]) -> list[FileChange]:
    if not parts:
        return []
    whole = FileChange(path, Counter(), Counter())
    for part in parts:
        # What one part added, the next may remove.
        remaining = whole.added - part.removed
        whole.removed += part.removed - whole.added
        whole.added = remaining + part.added
        whole.ends += part.ends
        whole.opaque = whole.opaque or part.opaque
    return [whole]


def _path(arguments: dict[str, Any]) -> str:
    for key in ("file_path", "path", "notebook_path", "filePath", "target_file", "filename", "absolute_path"):
        if path := string(arguments.get(key)):
            return path
    return ""


def _edit(arguments: dict[str, Any]) -> list[FileChange]:
    old = arguments.get("old_string", arguments.get("old_str", arguments.get("oldString")))
    new = arguments.get("new_string", arguments.get("new_str", arguments.get("newString")))
    path = _path(arguments)
    if old is None and new is None:
        return [FileChange(path, Counter(), Counter(), opaque=True)]
    if old == "":
        return [FileChange(path, Counter(), Counter(_lines(new)), whole=True)]
    return [_replaced(path, old, new)]


def _multi(arguments: dict[str, Any]) -> list[FileChange]:
    path = _path(arguments)
    parts = [_edit({**mapping(one), "file_path": path})[0] for one in items(arguments.get("edits"))]
    return _joined(path, parts) or [FileChange(path, Counter(), Counter(), opaque=True)]


def _write(arguments: dict[str, Any]) -> list[FileChange]:
    content = arguments.get("content", arguments.get("file_text", arguments.get("contents")))
    path = _path(arguments)
    if not isinstance(content, str):
        return [FileChange(path, Counter(), Counter(), opaque=True)]
    return [FileChange(path, Counter(), Counter(_lines(content)), whole=True)]


def _notebook(arguments: dict[str, Any]) -> list[FileChange]:
    path = f"{_path(arguments)}#{arguments.get('cell_id') or arguments.get('cell_number') or ''}"
    mode = arguments.get("edit_mode")
    if mode == "delete":
        return [FileChange(path, Counter(), Counter(), gone=True)]
    source = arguments.get("new_source")
    if not isinstance(source, str):
        return [FileChange(path, Counter(), Counter(), opaque=True)]
    return [FileChange(path, Counter(), Counter(_lines(source)), whole=mode != "insert")]


def _editor(arguments: dict[str, Any]) -> list[FileChange]:
    """The editor tool that Anthropic's API defines, which many programs have under their own name."""
    command, path = arguments.get("command"), _path(arguments)
    if command == "create":
        return _write(arguments)
    if command == "str_replace":
        return [_replaced(path, arguments.get("old_str"), arguments.get("new_str"))]
    if command == "insert":
        put = arguments.get("new_str", arguments.get("insert_text"))
        return [FileChange(path, Counter(), Counter(_lines(put)))]
    if command == "undo_edit":
        return [FileChange(path, Counter(), Counter(), opaque=True)]
    return []


def _insert(arguments: dict[str, Any]) -> list[FileChange]:
    put = arguments.get("content", arguments.get("text"))
    return [FileChange(_path(arguments), Counter(), Counter(_lines(put)), opaque=not isinstance(put, str))]


def _blocks(arguments: dict[str, Any]) -> list[FileChange]:
    """A diff of blocks SEARCH and REPLACE."""
    path = _path(arguments)
    diff = arguments.get("diff")
    if not isinstance(diff, str):
        return [FileChange(path, Counter(), Counter(), opaque=True)]
    parts: list[FileChange] = []
    old: list[str] = []
    new: list[str] = []
    side: list[str] | None = None
    for line in diff.split("\n"):
        if side is None:
            if _SEARCH.match(line):
                old, new = [], []
                side = old
        elif side is old and _DIVIDE.match(line):
            side = new
        elif side is new and _REPLACE.match(line):
            parts.append(_replaced(path, "\n".join(old), "\n".join(new)))
            side = None
        elif not _NUMBERED.match(line) and line != "-------":
            side.append(line)
    return _joined(path, parts) or [FileChange(path, Counter(), Counter(), opaque=True)]


def _patch_call(arguments: dict[str, Any]) -> list[FileChange]:
    for key in ("input", "patch", "patch_text", "patchText"):
        if patch := string(arguments.get(key)):
            return _patch(patch)
    command = items(arguments.get("command"))
    return _patch(str(command[1])) if len(command) > 1 else []


def _patch(text: str) -> list[FileChange]:
    """The changes of a patch in Codex's format, one for each file."""
    file_changes_: list[FileChange] = []
    removed: list[str] = []
    added: list[str] = []

    def close() -> None:
        if file_changes_:
            change = _replaced(file_changes_[-1].path, "\n".join(removed), "\n".join(added))
            file_changes_[-1].removed, file_changes_[-1].added = change.removed, change.added
        removed.clear()
        added.clear()

    for line in text.split("\n"):
        header = _HUNK.match(line.rstrip("\r")) if line.startswith("*** ") else None
        if header is not None:
            if header[3]:
                if file_changes_:
                    file_changes_[-1].path = header[3].strip()
                continue
            close()
            path = header[2].strip()
            file_changes_.append(
                FileChange(path, Counter(), Counter(), whole=header[1] == "Add", gone=header[1] == "Delete")
            )
        elif line[:1] == "-":
            removed.append(line[1:])
        elif line[:1] == "+":
            added.append(line[1:])
    close()
    return file_changes_


def _opaque(arguments: dict[str, Any]) -> list[FileChange]:
    return [FileChange(_path(arguments), Counter(), Counter(), opaque=True)]


_TOOLS: dict[str, Callable[[dict[str, Any]], list[FileChange]]] = {
    "edit": _edit,
    "multiedit": _multi,
    "write": _write,
    "notebookedit": _notebook,
    "replace": _edit,
    "write_file": _write,
    "write_to_file": _write,
    "new_file": _write,
    "create_file": _write,
    "replace_in_file": _blocks,
    "apply_diff": _blocks,
    "search_and_replace": _opaque,
    "insert_content": _insert,
    "apply_patch": _patch_call,
    "str_replace_editor": _editor,
    "str_replace_based_edit_tool": _editor,
    "file_editor": _editor,
    "str_replace": _edit,
    "search_replace": _edit,
    "edit_file": _opaque,
    "create": _write,
    "insert": _opaque,
}
