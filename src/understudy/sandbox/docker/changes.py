"""What changed in a container below a directory: listed by the engine, read in as few archives as possible.

The list only tells which paths changed; what a path is now is read from the archive. Nothing of the container
runs meanwhile. The list is made by comparing size, mode, owner and time: a file that was changed and has the size
and, to the second, the time that it had before is not in it.
"""

from __future__ import annotations

import json
import os
import posixpath
import tarfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence, Set

from understudy.sandbox.base import ChangedFile, IgnoreFilter, TreeChanges
from understudy.sandbox.docker import files
from understudy.sandbox.docker.engine import ContainerEngine, EngineRefused, engine_message

MAX_LIST_BYTES = 64 << 20
MAX_TOTAL_BYTES = 128 << 20
TIMEOUT_S = 60.0
_DELETED = 2
_UNREADABLE = "\ufffd"
"""What the engine's list has in place of bytes that are no UTF-8."""

_TOO_LONG = "file name too long"
"""What the engine says, after the path, of one that is longer than any system call takes."""

_FEW = 8
_FEW_OF_ONE = 4


class _ChangesRefused(Exception):
    """The changes cannot be read; the message is the reason."""


class _ChangeCollector:
    """Collects changed files within limits of time and size."""

    def __init__(self, file_limit: int) -> None:
        self.entries: dict[bytes, ChangedFile] = {}
        self.deleted: set[bytes] = set()
        self.directories: set[bytes] = set()
        self.again: list[bytes] = []
        self._file_limit = file_limit
        self._total = 0
        self._until = time.monotonic() + TIMEOUT_S

    def check_time(self) -> None:
        if time.monotonic() > self._until:
            raise _ChangesRefused(f"the changes could not be read in {TIMEOUT_S:.0f} s")

    def check_size(self, path: bytes, size: int) -> None:
        if size > self._file_limit:
            raise _ChangesRefused(f"{path.decode(errors='replace')!r} is larger than {self._file_limit} bytes")

    def _add(self, size: int) -> None:
        self._total += size
        if self._total > MAX_TOTAL_BYTES:
            raise _ChangesRefused(f"the changes are more than {MAX_TOTAL_BYTES} bytes")

    def take(self, path: bytes, member: tarfile.TarInfo, tar: tarfile.TarFile, directory: bytes) -> None:
        """Record a member of the archive of `directory` as what is at `path` now."""
        if member.isdir():
            self.directories.add(path)
        elif member.issym():
            self.entries[path] = ChangedFile("120000", os.fsencode(member.linkname))
        elif member.islnk():
            # Its content is that of another member, which may have gone by.
            other = self.entries.get(posixpath.join(directory, os.fsencode(member.linkname).partition(b"/")[2]))
            if other is None:
                self.again.append(path)
            else:
                self._add(len(other.data))  # a patch has it again under each name
                self.entries[path] = other
        elif member.isreg() and (file := tar.extractfile(member)) is not None:
            self.check_size(path, member.size)
            self._add(member.size)
            self.entries[path] = ChangedFile("100755" if files.executable(member) else "100644", file.read())
        else:
            self.deleted.add(path)


def read_changes(
    engine: ContainerEngine,
    container: str,
    workdir: str,
    mounts: Sequence[str],
    file_limit: int,
    ignored: IgnoreFilter,
) -> TreeChanges:
    """What changed below `workdir` but for what lies at `mounts`. Raises what the engine's calls raise."""
    taking = _ChangeCollector(file_limit)
    try:
        status = engine.stat(container, workdir)
        if status is None or not files.is_plain_directory(status):
            return TreeChanges({}, frozenset({b""}))
        _read(engine, container, workdir, mounts, ignored, taking)
    except _ChangesRefused as error:
        return TreeChanges({}, refused=str(error))
    return TreeChanges(taking.entries, frozenset(taking.deleted), frozenset(taking.directories))


def _read(
    engine: ContainerEngine,
    container: str,
    workdir: str,
    mounts: Sequence[str],
    ignored: IgnoreFilter,
    taking: _ChangeCollector,
) -> None:
    base = workdir.rstrip("/") + "/"
    outside = [mount.removeprefix(base).encode() for mount in mounts if mount.startswith(base)]
    present: set[bytes] = set()
    renewed: set[bytes] = set()
    for path, kind in _listed(engine, container):
        if path == workdir and kind == _DELETED:
            taking.deleted.add(b"")
        if not path.startswith(base):
            continue
        name = path.removeprefix(base)
        if _UNREADABLE in name:
            directory_name = name[: name.index(_UNREADABLE)].rpartition("/")[0]
            renewed.add(directory_name.encode())
            continue
        if _counts(path_ := name.encode(), outside):
            (taking.deleted if kind == _DELETED else present).add(path_)
    for path in list(present | taking.deleted | renewed):
        _add_parents(path, taking.directories)
    leaves = sorted(present - taking.directories)
    wanted = set(leaves) - ignored(leaves)
    for directory in renewed:
        _renew(engine, container, workdir, directory, outside, ignored, taking)
    for path in _fetch_plan(wanted):
        if isinstance(path, bytes):
            _take_one(engine, container, workdir, path, taking)
        else:
            _take_many(engine, container, workdir, path[0], path[1], taking)
    for path in taking.again:
        _take_one(engine, container, workdir, path, taking)


def _listed(engine: ContainerEngine, container: str) -> list[tuple[str, int]]:
    try:
        response = engine.get(f"/containers/{container}/changes", stream=True)
    except EngineRefused as error:
        if _TOO_LONG in (message := engine_message(error)):
            raise _ChangesRefused(f"the engine cannot list them: …{message[-80:]}") from error
        raise
    try:
        content = bytearray()
        for chunk in response.iter_content(1 << 18):
            content += chunk
            if len(content) > MAX_LIST_BYTES:
                raise _ChangesRefused("too many files were changed")
    finally:
        response.close()
    return [(change["Path"], change["Kind"]) for change in json.loads(bytes(content)) or ()]


def _counts(path: bytes, outside: Sequence[bytes]) -> bool:
    """Whether a path is the task's: not in a git directory, nor at or below a mount."""
    if any(part.lower() == b".git" for part in path.split(b"/")):
        return False
    return not any(path == mount or path.startswith(mount + b"/") for mount in outside)


def _add_parents(path: bytes, directories: set[bytes]) -> None:
    while path := path.rpartition(b"/")[0]:
        if path in directories:
            return
        directories.add(path)


def _fetch_plan(wanted: set[bytes]) -> Iterator[bytes | tuple[bytes, set[bytes]]]:
    """Paths to fetch alone, and directories to fetch whole with the wanted paths in them."""
    if len(wanted) <= _FEW:
        yield from sorted(wanted)
        return
    groups: dict[bytes, set[bytes]] = defaultdict(set)
    for path in wanted:
        groups[path.split(b"/", 1)[0]].add(path)
    if len(groups) > _FEW * _FEW_OF_ONE:
        yield b"", wanted
        return
    for group in groups.values():
        if len(group) <= _FEW_OF_ONE:
            yield from sorted(group)
        else:
            yield posixpath.commonpath([posixpath.dirname(path) for path in group]), group


def _members(
    engine: ContainerEngine, container: str, workdir: str, directory: bytes, taking: _ChangeCollector
) -> Iterator[tuple[bytes, tarfile.TarInfo, tarfile.TarFile]]:
    """Everything in a directory of the container, by its path below the workdir."""
    with files.archive(engine, container, posixpath.join(workdir, os.fsdecode(directory)).rstrip("/")) as tar:
        for member in tar:
            taking.check_time()
            inside = os.fsencode(member.name.rstrip("/")).partition(b"/")[2]
            if inside:
                yield posixpath.join(directory, inside), member, tar


def _take_one(
    engine: ContainerEngine, container: str, workdir: str, path: bytes, taking: _ChangeCollector
) -> None:
    taking.check_time()
    absolute = posixpath.join(workdir, os.fsdecode(path))
    try:
        status = engine.stat(container, absolute)
    except EngineRefused:  # a link that leads to itself, for one, is only seen from above
        _take_many(engine, container, workdir, posixpath.dirname(path), {path}, taking)
        return
    if status is None:
        taking.deleted.add(path)
    elif files.is_plain_directory(status):
        taking.directories.add(path)
    elif files.is_special(status):
        taking.deleted.add(path)
    else:
        taking.check_size(path, int(status["size"]))
        with files.archive(engine, container, absolute) as tar:
            if (member := tar.next()) is not None:
                taking.take(path, member, tar, posixpath.dirname(path))


def _take_many(
    engine: ContainerEngine,
    container: str,
    workdir: str,
    directory: bytes,
    wanted: Set[bytes],
    taking: _ChangeCollector,
) -> None:
    for path, member, tar in _members(engine, container, workdir, directory, taking):
        if path in wanted:
            taking.take(path, member, tar, directory)


def _renew(
    engine: ContainerEngine,
    container: str,
    workdir: str,
    directory: bytes,
    outside: Sequence[bytes],
    ignored: IgnoreFilter,
    taking: _ChangeCollector,
) -> None:
    """Take a directory as it is now, where the engine's list cannot name what changed in it."""
    names = {path: member.isdir() for path, member, _ in _members(engine, container, workdir, directory, taking)}
    leaves = sorted(path for path, is_directory in names.items() if not is_directory and _counts(path, outside))
    wanted = set(leaves) - ignored(leaves)
    _take_many(engine, container, workdir, directory, wanted, taking)
    # What is in the task's tree but ignored is looked for as well: `ignored` never has such a path.
    taking.deleted.add(directory)
