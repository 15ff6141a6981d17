"""Which edits are still there at the end of a conversation, by the lines that each of them added."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

from msgspec import Struct

from understudy.ingest.signals.edits import FileChange, LineCounts
from understudy.ingest.signals.shell import ShellCommand

_NEAR = 100
"""How many first and last lines of a file's edits are remembered, to recognise edits of parts of lines."""
_DELETIONS = 8
"""How many edits of a file that only removed lines are remembered, to recognise when they are undone."""
_SHORTEST_PART = 4
_LONGEST_PART = 2_000

_NAMES = re.compile(r"[\w.+-]{1,200}\.\w{1,12}|(?:Makefile|Dockerfile)")
_WRITES = ("write", "open(", "replace(", "dump(", "unlink", "rename(", "save")

# Programs that change the files they name.
_CHANGES_TEXT = """
mv cp tee truncate patch install rsync ln ed ex dd shred unlink sponge
"""
_CHANGES = frozenset(_CHANGES_TEXT.split())
_REMOVES = frozenset(["rm", "unlink", "trash", "del"])
_IN_PLACE = frozenset(["sed", "gsed", "perl", "awk", "gawk", "ruby", "yq"])
_SCRIPTED = re.compile(r"(?:python|pypy|py|node|ruby|perl|php|deno|bun)[\d.]*(?:\.exe)?")
_GIT_NAMED = frozenset(("checkout", "restore"))


CHANGING = re.compile(
    r"\b(?:mv|cp|tee|rm|sed|perl|awk|gawk|yq|git|patch|install|rsync|ln|ed|ex|dd|truncate|shred|unlink|sponge|trash|del"
    r"|python[\d.]*|node|ruby|php|deno|bun|pypy|py)\b|(?<![\d&])>(?!&)"
)
"""Matches every command that may change a file: others need not be parsed."""


class TrackedEdit(Struct):
    """One edit of one file. `put` counts the lines that it added, `left` those of them that are still there.

    `gone` are the lines removed by an edit that added none. `unknown`: whether it survived cannot be known. `age`
    is the number of commits before it.
    """

    path: str
    put: int = 0
    left: int = 0
    gone: LineCounts | None = None
    undone: bool = False
    unknown: bool = False
    age: int = 0

    @property
    def survived(self) -> bool | None:
        """Whether at least half of its lines are still there, None where that is unknown."""
        if self.unknown:
            return None
        return not self.undone and self.left * 2 >= self.put


class _TrackedFile(Struct):
    """The edits of a file, and for each of its lines the edits that added it, the newest last."""

    edits: list[TrackedEdit]
    owners: dict[str, list[TrackedEdit]]
    edges: deque[tuple[str, TrackedEdit]]
    deletions: list[TrackedEdit]


class FileTracker:
    """The files of a conversation, to which its edits and commands are applied in order."""

    def __init__(self) -> None:
        self._files: dict[str, _TrackedFile] = {}
        self._named: dict[str, list[str]] = {}
        self._commits = 0

    def apply(self, change: FileChange) -> TrackedEdit:
        """Apply a change. Returns the edit, which later changes update."""
        path = _normal(change.path)
        file = self._files.get(path)
        if file is None:
            file = self._files[path] = _TrackedFile([], {}, deque(maxlen=_NEAR), [])
            self._named.setdefault(path.rpartition("/")[2].partition("#")[0], []).append(path)
        edit = TrackedEdit(path, unknown=change.opaque or not path, age=self._commits)
        if change.opaque:
            self._doubt(file)
        elif change.gone:
            self._forget(file)
        elif change.whole:
            self._overwrite(file, change.added)
        else:
            self._take(file, change)
        self._put(file, edit, change)
        file.edits.append(edit)
        return edit

    def run_command(self, command: ShellCommand) -> None:
        """Apply what a shell command may have done to the edited files."""
        if not self._files or not (command.argv or command.writes):
            return
        program, rest = command.program, command.argv[1:]
        if program == "git":
            self._git([word for word in rest if not word.startswith("-")], rest)
        elif program in _REMOVES:
            for path in self._matching(rest):
                self._forget(self._files[path])
        elif program in _CHANGES:
            # What is copied or renamed is still there, under another name.
            named = rest[-1:] if program in ("cp", "install", "rsync", "ln") else rest
            self._doubt_named(named)
        elif program in _IN_PLACE and any(word.startswith("-") and "i" in word for word in rest):
            self._doubt_named(rest)
        elif _SCRIPTED.fullmatch(program):
            script = command.body or next((word for flag, word in pairwise(rest) if flag in ("-c", "-e")), "")
            if any(sign in script for sign in _WRITES):
                self._doubt_named(_NAMES.findall(script))
        self._doubt_named(command.writes)

    @property
    def empty(self) -> bool:
        """Whether nothing was edited yet."""
        return not self._files

    def commit(self) -> None:
        """Note a commit: restoring files to the last commit does not undo the edits before it."""
        self._commits += 1

    def _git(self, plain: Sequence[str], rest: Sequence[str]) -> None:
        action = plain[0] if plain else ""
        if action in _GIT_NAMED:
            if "--staged" in rest and "--worktree" not in rest:
                return
            if "-b" in rest or "-B" in rest or "-c" in rest:
                return
            matches = self._matching(plain[1:])
            for path in matches:
                self._reset(self._files[path])
            for word in plain[1:] if not matches else ():
                within = f"/{_normal(word).strip('/')}/"
                for path, file in self._files.items():
                    if word == "." or within in f"/{path}":
                        self._reset(file)
        elif action == "reset" and "--hard" in rest:
            self._doubt_all(committed=plain[1:2] not in ([], ["HEAD"]))
        elif action == "clean" or (action == "stash" and (plain[1:2] or ["push"])[0] in ("push", "save")):
            self._doubt_all(committed=False)
        elif action == "revert" or (action == "apply" and not {"-R", "--reverse"}.isdisjoint(rest)):
            self._doubt_all(committed=True)
        elif action == "rm" and "--cached" not in rest:
            for path in self._matching(plain[1:]):
                self._forget(self._files[path])
        elif action == "mv":
            self._doubt_named(plain[1:])

    def _matching(self, names: Sequence[str]) -> list[str]:
        """The edited files that one of the arguments names."""
        matches: list[str] = []
        for name in names:
            name = _normal(name)
            for path in self._named.get(name.rpartition("/")[2], ()):
                if (
                    path == name
                    or path.endswith(f"/{name.lstrip('/')}")
                    or name.endswith(f"/{path.lstrip('/')}")
                    or path.rpartition("/")[2] == name
                ):
                    matches.append(path)
        return matches

    def _doubt_named(self, names: Sequence[str]) -> None:
        for path in self._matching(names):
            self._doubt(self._files[path])

    def _doubt(self, file: _TrackedFile) -> None:
        for edit in file.edits:
            edit.unknown = edit.unknown or not edit.undone
        self._clear(file)

    def _doubt_all(self, *, committed: bool) -> None:
        """Mark all edits as unknown, or without `committed` only those since the last commit."""
        for path in list(self._files):
            file = self._files[path]
            committed_before = [edit for edit in file.edits if not committed and edit.age < self._commits]
            for edit in file.edits:
                edit.unknown = edit.unknown or (not edit.undone and (committed or edit.age == self._commits))
            if not committed_before:
                self._clear(file)

    def _forget(self, file: _TrackedFile) -> None:
        """The file was deleted or restored: all its edits are undone."""
        for edit in file.edits:
            edit.undone, edit.unknown = True, False
        self._clear(file)

    def _reset(self, file: _TrackedFile) -> None:
        if any(edit.age < self._commits for edit in file.edits):
            for edit in file.edits:
                edit.undone = edit.undone or edit.age == self._commits
            return
        self._forget(file)

    def _clear(self, file: _TrackedFile) -> None:
        # These edits cannot change any more. Dropping them keeps the total work linear.
        file.edits.clear()
        file.owners.clear()
        file.edges.clear()
        file.deletions.clear()

    def _overwrite(self, file: _TrackedFile, now: LineCounts) -> None:
        for line in list(file.owners):
            owners = file.owners[line]
            while len(owners) > now[line]:
                owners.pop().left -= 1
            if not owners:
                del file.owners[line]
        for edit in file.edits:
            # An emptied file holds no edit, whatever was unknown before.
            if edit.unknown and not now:
                edit.undone, edit.unknown = True, False

    def _take(self, file: _TrackedFile, change: FileChange) -> None:
        for line, count in change.removed.items():
            owners = file.owners.get(line, [])
            for _ in range(min(count, len(owners))):
                owners.pop().left -= 1
            if not owners:
                file.owners.pop(line, None)
        for part in change.ends:
            self._take_part(file, part)
        if file.deletions:
            remaining: list[TrackedEdit] = []
            for edit in file.deletions:
                if edit.gone is not None and not edit.gone - change.added:
                    edit.undone = True
                else:
                    remaining.append(edit)
            file.deletions = remaining

    def _take_part(self, file: _TrackedFile, part: str) -> None:
        """Match the edge of an edit, which may be a part of a line, with the edges of earlier edits."""
        if not _SHORTEST_PART <= len(part) <= _LONGEST_PART:
            return
        for line, edit in reversed(file.edges):
            within = part in line or (len(line) >= _SHORTEST_PART and line in part)
            owners = file.owners.get(line)
            if within and line != part and owners and owners[-1] is edit:
                owners.pop()
                edit.left -= 1
                if not owners:
                    del file.owners[line]
                return

    def _put(self, file: _TrackedFile, edit: TrackedEdit, change: FileChange) -> None:
        if change.opaque or change.gone:
            return
        if not change.added and change.removed:
            edit.gone = change.removed
            file.deletions.append(edit)
            del file.deletions[:-_DELETIONS]
        for line, count in change.added.items():
            owners = file.owners.setdefault(line, [])
            new = max(count - len(owners), 0) if change.whole else count
            owners.extend([edit] * new)
            edit.put += new
            edit.left += new
        if not change.whole and change.added:
            added = list(change.added)
            for line in {added[0], added[-1]}:
                if len(line) <= _LONGEST_PART:
                    file.edges.append((line, edit))


def _normal(path: str) -> str:
    path = path.replace("\\", "/")
    while path.startswith("./"):
        path = path[2:]
    return path


def count_survived(edits: Sequence[TrackedEdit]) -> int | None:
    """How many edits survived, None where that is unknown of one of them."""
    survived = [edit.survived for edit in edits]
    return None if None in survived else sum(1 for one in survived if one)
