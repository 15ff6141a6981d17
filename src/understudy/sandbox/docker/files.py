"""Reads and writes files of a container through the engine's archive API: no program in the container takes part,
and no link leads out.

The engine lists the paths that changed below a directory; their present content is read in as few archives as
possible. Nothing in the container runs meanwhile. The engine compares size, mode, owner and time, so a changed
file with the same size and the same time (to the second) is missed.
"""

from __future__ import annotations

import io
import json
import os
import posixpath
import re
import shutil
import stat
import tarfile
import tempfile
import time
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Sequence, Set
from contextlib import closing, contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO, cast

from understudy.errors import SandboxError
from understudy.sandbox.base import ChangedFile, IgnoreFilter, TreeChanges
from understudy.sandbox.docker.engine import (
    ContainerEngine,
    EngineNotFound,
    EngineRefused,
    engine_errors,
    engine_message,
)

_LINK = 1 << 27
_DIRECTORY = 1 << 31
_SPECIAL = 1 << 26 | 1 << 25 | 1 << 24 | 1 << 21 | 1 << 19
"""Go's bits of a file's mode: device, pipe, socket, character device, irregular."""

_MAX_LINKS = 16
_LOADER = re.compile(rb"#! *(/[^ \t\r\n]+)|\x7fELF.*?\0(/[\w./+-]*\bld[\w.+-]*)\0", re.S)
_CHUNK = 1 << 18

MAX_LIST_BYTES = 64 << 20
MAX_TOTAL_BYTES = 128 << 20
TIMEOUT_S = 60.0
_DELETED = 2
_UNREADABLE = "\ufffd"
"""The engine's list has this character in place of bytes that are not valid UTF-8."""

_TOO_LONG = "file name too long"
"""The end of the engine's error message for a path that is too long for system calls."""

_FEW = 8
_FEW_OF_ONE = 4


class _Stream(io.RawIOBase):
    """A readable, unseekable file over an iterator of chunks."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = memoryview(chunk)
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count


class ContainerFiles:
    """The files of one container. Paths are absolute. SandboxErrors name the path."""

    def __init__(self, engine: ContainerEngine, container: str) -> None:
        self._engine = engine
        self._container = container

    def mode(self, path: str) -> int | None:
        """Return Go's mode bits of a path, without following a final link; None if there is nothing."""
        status = self._engine.stat(self._container, path)
        return None if status is None else int(status["mode"])

    def _follow(self, path: str) -> tuple[str, int | None]:
        """Follow the links at a path; return the final path, and its mode, or None if there is nothing."""
        for _ in range(_MAX_LINKS):
            status = self._engine.stat(self._container, path)
            if status is None:
                return path, None
            mode = int(status["mode"])
            if not mode & _LINK:
                return path, mode
            path = posixpath.join(posixpath.dirname(path), str(status["linkTarget"]))
        raise SandboxError(
            f"cannot read {path} in the sandbox: more than {_MAX_LINKS} links to follow; expected a path "
            "whose links lead to a file: give another path"
        )

    @contextmanager
    def archive(self, path: str) -> Generator[tarfile.TarFile]:
        """Open a path as a tar archive, which can be read once; its root is named like the last part of the path.

        Raises EngineNotFound, and the library's errors.
        """
        url = f"/containers/{self._container}/archive"
        with closing(self._engine.get(url, stream=True, path=os.fsencode(path))) as response:
            file = io.BufferedReader(_Stream(response.iter_content(_CHUNK)), _CHUNK)
            with tarfile.open(
                fileobj=cast(IO[bytes], file), mode="r|", encoding="utf-8", errors="surrogateescape"
            ) as tar:
                yield tar

    def read(self, path: str, *, limit: int) -> bytes:
        """Return the content of a regular file; links are followed inside. Raises FileNotFoundError,
        SandboxError.
        """
        with engine_errors(f"read {path} in the sandbox"):
            path, mode = self._follow(path)
            if mode is None:
                raise FileNotFoundError(2, "no such file in the sandbox", path)
            if mode & (_DIRECTORY | _SPECIAL):
                raise SandboxError(
                    f"cannot read {path} in the sandbox: it is a directory or special file; expected a "
                    "regular file: give another path"
                )
            try:
                with self.archive(path) as tar:
                    member = tar.next()
                    file = tar.extractfile(member) if member is not None and member.isreg() else None
                    if member is None or file is None:
                        raise SandboxError(
                            f"cannot read {path} in the sandbox: it was replaced while it was read; expected "
                            "a regular file: read it again"
                        )
                    if member.size > limit:
                        raise SandboxError(
                            f"cannot read {path} in the sandbox: it has {member.size} bytes, expected at "
                            f"most {limit} bytes: write less into it"
                        )
                    return file.read()
            except EngineNotFound as error:
                raise FileNotFoundError(2, "no such file in the sandbox", path) from error
            except tarfile.TarError as error:
                raise SandboxError(
                    f"cannot read {path} in the sandbox: the container engine sent an invalid archive: {error}; "
                    "read it again"
                ) from error

    def write(self, path: str, data: bytes, *, mode: int, user: int) -> None:
        """Write a regular file with its parent directories, owned by `user`. Raises SandboxError."""
        with engine_errors(f"write {path} in the sandbox"):
            if (self.mode(path) or 0) & (_DIRECTORY | _SPECIAL):
                raise SandboxError(
                    f"cannot write {path} in the sandbox: there is a directory or special file; expected a "
                    "regular file, or none: choose another path"
                )
            new_directories: list[str] = []
            parent = posixpath.dirname(path)
            while (parent_mode := self.mode(parent)) is None and parent != "/":
                new_directories.insert(0, posixpath.basename(parent))
                parent = posixpath.dirname(parent)
            if parent_mode is not None and not parent_mode & (_DIRECTORY | _LINK):
                raise SandboxError(
                    f"cannot write {path} in the sandbox: {parent} is a file; expected a directory: choose "
                    "another path"
                )
            output = io.BytesIO()
            with tarfile.open(fileobj=output, mode="w", format=tarfile.PAX_FORMAT) as tar:
                for depth in range(1, len(new_directories) + 1):
                    tar.addfile(_owned("/".join(new_directories[:depth]), 0o755, user, tarfile.DIRTYPE))
                info = _owned("/".join((*new_directories, posixpath.basename(path))), mode, user, tarfile.REGTYPE)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
            try:
                self._engine.api.put_archive(self._container, parent, output.getvalue())
            except EngineNotFound as error:
                raise SandboxError(
                    f"cannot write {path} in the sandbox: {engine_message(error)}; its container or "
                    f"{parent} was removed: open a new sandbox"
                ) from error

    def put_tree(self, tree: Path, into: str, user: int, name: str = ".", *, read_only: bool = False) -> None:
        """Copy a file or directory of this machine to `name` in the container's directory `into`, owned
        by `user`.
        """
        with tempfile.TemporaryFile() as archive:
            pack_tar(tree, archive, user, name, read_only=read_only)
            archive.seek(0)
            self._engine.api.put_archive(self._container, into, archive)

    def is_program(self, path: str) -> bool:
        """Return whether `path` is an executable regular file; links are followed."""
        try:
            mode = self._follow(path)[1]
        except SandboxError:  # links that form a circle
            return False
        return mode is not None and not mode & (_DIRECTORY | _SPECIAL) and bool(mode & 0o111)

    def is_directory(self, path: str, *, link: bool = True) -> bool:
        """Return whether `path` is a directory; with `link`, also whether it is a link, which may lead to one."""
        return bool((self.mode(path) or 0) & (_DIRECTORY | _LINK if link else _DIRECTORY))

    def missing_loader(self, path: str) -> str:
        """Return the interpreter or dynamic loader that a program needs and that is missing; "" if nothing is
        missing.

        Raises FileNotFoundError, SandboxError.
        """
        with engine_errors(f"read {path} in the sandbox"), self.archive(path) as tar:
            member = tar.next()
            file = tar.extractfile(member) if member is not None and member.isreg() else None
            match = _LOADER.match(file.read(4096)) if file is not None else None
        loader = (match[1] or match[2]).decode(errors="replace") if match else ""
        return loader if loader and self.mode(loader) is None else ""

    def changes(
        self, workdir: str, mounts: Sequence[str], *, file_limit: int, ignored: IgnoreFilter
    ) -> TreeChanges:
        """Return what changed below `workdir`, except at `mounts`. Raises the errors of the engine's calls."""
        reader = _ChangeReader(self, workdir, mounts, file_limit, ignored)
        try:
            if not self.is_directory(workdir, link=False):
                return TreeChanges({}, frozenset({b""}))
            reader.read(self._list_changes())
        except _ChangesRefused as error:
            return TreeChanges({}, refused=str(error))
        return TreeChanges(reader.entries, frozenset(reader.deleted), frozenset(reader.directories))

    def _list_changes(self) -> list[tuple[str, int]]:
        """Return the engine's list of changed paths with the kind of change. Programs in the container cannot
        forge it.
        """
        try:
            response = self._engine.get(f"/containers/{self._container}/changes", stream=True)
        except EngineRefused as error:
            if _TOO_LONG in (message := engine_message(error)):
                raise _ChangesRefused(
                    "the container engine cannot list the changed files, because the path of one is too long for "
                    f"system calls (4,095 bytes): …{message[-80:]}; remove it, or nest directories less deeply"
                ) from error
            raise
        content = bytearray()
        with closing(response):
            for chunk in response.iter_content(_CHUNK):
                content += chunk
                if len(content) > MAX_LIST_BYTES:
                    raise _ChangesRefused(
                        "too many files were changed in the container: the engine's list of them, which includes "
                        f"ignored files and those outside the task's tree, is longer than {MAX_LIST_BYTES >> 20} "
                        "MiB, the maximum; change fewer files (installs and build outputs count)"
                    )
        return [(change["Path"], change["Kind"]) for change in json.loads(bytes(content)) or ()]


def _owned(name: str, mode: int, user: int, kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.uid, info.gid = kind, mode, user, user
    return info


def _is_executable(member: tarfile.TarInfo) -> bool:
    """Return whether git would record a file as executable."""
    return bool(member.mode & stat.S_IXUSR)


class _ChangesRefused(Exception):
    """The changes cannot be read; the message is the reason."""


class _ChangeReader:
    """Reads the changes below `workdir`, within limits of time and size."""

    def __init__(
        self, files: ContainerFiles, workdir: str, mounts: Sequence[str], file_limit: int, ignored: IgnoreFilter
    ) -> None:
        self.entries: dict[bytes, ChangedFile] = {}
        self.deleted: set[bytes] = set()
        self.directories: set[bytes] = set()
        self._files = files
        self._workdir = workdir
        self._base = base = workdir.rstrip("/") + "/"
        self._outside = [mount.removeprefix(base).encode() for mount in mounts if mount.startswith(base)]
        self._ignored = ignored
        self._file_limit = file_limit
        self._again: list[bytes] = []
        self._total = 0
        self._until = time.monotonic() + TIMEOUT_S

    def read(self, changes: Sequence[tuple[str, int]]) -> None:
        """Read the present content of the changed paths. Raises _ChangesRefused."""
        present: set[bytes] = set()
        renewed: set[bytes] = set()
        for path, kind in changes:
            if path == self._workdir and kind == _DELETED:
                self.deleted.add(b"")
            if not path.startswith(self._base):
                continue
            name = path.removeprefix(self._base)
            if _UNREADABLE in name:
                renewed.add(name[: name.index(_UNREADABLE)].rpartition("/")[0].encode())
            elif self._counts(name.encode()):
                (self.deleted if kind == _DELETED else present).add(name.encode())
        for changed in list(present | self.deleted | renewed):
            _add_parents(changed, self.directories)
        wanted = self._wanted(present - self.directories)
        for directory in renewed:
            self._renew(directory)
        for directory, names in _fetch_plan(wanted):
            if directory is None:
                self._take_one(*names)
            else:
                self._take_many(directory, names)
        for changed in self._again:
            self._take_one(changed)

    def _counts(self, path: bytes) -> bool:
        """Return whether a path belongs to the task: not in a git directory, nor at or below a mount."""
        if any(part.lower() == b".git" for part in path.split(b"/")):
            return False
        return not any(path == mount or path.startswith(mount + b"/") for mount in self._outside)

    def _wanted(self, paths: Iterable[bytes]) -> set[bytes]:
        leaves = sorted(paths)
        return set(leaves) - self._ignored(leaves)

    def _check_time(self) -> None:
        if time.monotonic() > self._until:
            raise _ChangesRefused(
                f"reading the changes took longer than {TIMEOUT_S:.0f} s, the time limit; change fewer files"
            )

    def _add_size(self, size: int) -> None:
        self._total += size
        if self._total > MAX_TOTAL_BYTES:
            raise _ChangesRefused(
                f"the changed files have more than {MAX_TOTAL_BYTES} bytes in total, the maximum; write less"
            )

    def _take(self, path: bytes, member: tarfile.TarInfo, tar: tarfile.TarFile, directory: bytes) -> None:
        """Record a member of the archive of `directory` as the present content of `path`."""
        if member.isdir():
            self.directories.add(path)
        elif member.issym():
            self.entries[path] = ChangedFile("120000", os.fsencode(member.linkname))
        elif member.islnk():
            # A hard link has the content of another member, which may have been skipped already: then it is read
            # later.
            link_target = self.entries.get(
                posixpath.join(directory, os.fsencode(member.linkname).partition(b"/")[2])
            )
            if link_target is None:
                self._again.append(path)
            else:
                # Counted again, because a patch has the content under each name.
                self._add_size(len(link_target.data))
                self.entries[path] = link_target
        elif member.isreg() and (file := tar.extractfile(member)) is not None:
            if member.size > self._file_limit:
                raise _ChangesRefused(
                    f"{path.decode(errors='replace')!r} is larger than {self._file_limit} bytes, the "
                    "maximum; write less into it"
                )
            self._add_size(member.size)
            self.entries[path] = ChangedFile("100755" if _is_executable(member) else "100644", file.read())
        else:
            self.deleted.add(path)

    def _members(self, directory: bytes) -> Iterator[tuple[bytes, tarfile.TarInfo, tarfile.TarFile]]:
        """Yield everything in a directory of the container: path below the workdir, member and archive."""
        path = posixpath.join(self._workdir, os.fsdecode(directory)).rstrip("/")
        with self._files.archive(path) as tar:
            for member in tar:
                self._check_time()
                inside = os.fsencode(member.name.rstrip("/")).partition(b"/")[2]
                if inside:
                    yield posixpath.join(directory, inside), member, tar

    def _take_one(self, path: bytes) -> None:
        self._check_time()
        absolute = posixpath.join(self._workdir, os.fsdecode(path))
        try:
            mode = self._files.mode(absolute)
        except EngineRefused:  # for example a link to itself, which can only be read in its directory's archive
            self._take_many(posixpath.dirname(path), {path})
            return
        if mode is None or mode & _SPECIAL:
            self.deleted.add(path)
        elif mode & _DIRECTORY:
            self.directories.add(path)
        else:
            with self._files.archive(absolute) as tar:
                if (member := tar.next()) is not None:
                    self._take(path, member, tar, posixpath.dirname(path))

    def _take_many(self, directory: bytes, wanted: Set[bytes]) -> None:
        for path, member, tar in self._members(directory):
            if path in wanted:
                self._take(path, member, tar, directory)

    def _renew(self, directory: bytes) -> None:
        """Read a directory completely, because the engine's list cannot name the files that changed in it."""
        is_directory = {path: member.isdir() for path, member, _ in self._members(directory)}
        wanted = self._wanted(path for path in is_directory if not is_directory[path] and self._counts(path))
        self._take_many(directory, wanted)
        # The whole directory counts as deleted first. Files of the task's tree are read again even if git ignores
        # them, because `ignored` never returns a path of the tree.
        self.deleted.add(directory)


def _add_parents(path: bytes, directories: set[bytes]) -> None:
    while path := path.rpartition(b"/")[0]:
        if path in directories:
            return
        directories.add(path)


def _fetch_plan(wanted: set[bytes]) -> Iterator[tuple[bytes | None, set[bytes]]]:
    """Yield each directory to fetch as a whole, with the wanted paths in it; None for a path to fetch alone."""
    groups: dict[bytes, set[bytes]] = defaultdict(set)
    for path in wanted:
        groups[path.split(b"/", 1)[0]].add(path)
    if len(groups) > _FEW * _FEW_OF_ONE:
        yield b"", wanted
        return
    for group in groups.values():
        if len(wanted) <= _FEW or len(group) <= _FEW_OF_ONE:
            yield from ((None, {path}) for path in sorted(group))
        else:
            yield posixpath.commonpath([posixpath.dirname(path) for path in group]), group


def pack_tar(tree: Path, output: BinaryIO, user: int, name: str = ".", *, read_only: bool = False) -> None:
    """Write a file or directory as `name` to a tar archive, with its parent directories, owned by `user`; links
    stay links.
    """

    def owned(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = user
        info.uname = info.gname = ""
        if read_only and not info.issym():
            info.mode = 0o755 if info.isdir() or info.mode & stat.S_IXUSR else 0o644
        return info

    with tarfile.open(fileobj=output, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for parent in reversed(PurePosixPath(name).parents[:-1]):
            info = tarfile.TarInfo(str(parent))
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(owned(info))
        tar.add(tree, name, filter=owned)


def unpack_tar(tar: tarfile.TarFile, into: Path) -> None:
    """Extract an archive into the new directory `into`, without the first part of each member's name.

    Raises tarfile.TarError for a member that would be written outside of it, also through an earlier link.
    """
    into.mkdir(parents=True)
    links: set[PurePosixPath] = set()
    for member in tar:
        parts = PurePosixPath(member.name).parts[1:]
        path = PurePosixPath(*parts)
        if any(part.lower() == ".git" for part in parts) or not parts:
            continue
        if ".." in parts or path.is_absolute() or any(parent in links for parent in (path, *path.parents)):
            raise tarfile.TarError(f"{member.name!r} points outside of the tree; expected a path below it")
        target = into / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if member.isdir():
            target.mkdir(exist_ok=True)
        elif member.issym():
            target.symlink_to(member.linkname)
            links.add(path)
        elif member.islnk():
            link_target = PurePosixPath(*PurePosixPath(member.linkname).parts[1:])
            if ".." in link_target.parts or any(parent in links for parent in link_target.parents):
                raise tarfile.TarError(
                    f"{member.name!r} is a link that points outside of the tree; expected a target in it"
                )
            if link_target in links:
                target.symlink_to((into / link_target).readlink())
                links.add(path)
            elif (into / link_target).is_file():
                shutil.copy2(into / link_target, target)
        elif member.isreg() and (content := tar.extractfile(member)) is not None:
            with content, target.open("xb") as file:
                shutil.copyfileobj(content, file, 1 << 18)
            target.chmod(0o755 if _is_executable(member) else 0o644)
