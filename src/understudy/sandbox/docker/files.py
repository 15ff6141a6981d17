"""Files of a container through the engine's archives: nothing that lies in it is asked, and no link leads out."""

from __future__ import annotations

import io
import os
import posixpath
import re
import stat
import tarfile
from collections.abc import Generator, Iterable, Mapping
from contextlib import closing, contextmanager
from typing import IO, Any, cast

from understudy.errors import SandboxError
from understudy.sandbox.docker.engine import ContainerEngine, EngineNotFound, engine_errors

_LINK = 1 << 27
_DIRECTORY = 1 << 31
_OTHER = 1 << 26 | 1 << 25 | 1 << 24 | 1 << 21 | 1 << 19
"""Go's bits of a file's mode: device, pipe, socket, character device, irregular."""

_MOST_LINKS = 16
_LOADER = re.compile(rb"#! *(/[^ \t\r\n]+)|\x7fELF.*?\0(/[\w./+-]*\bld[\w.+-]*)\0", re.S)


class _Stream(io.RawIOBase):
    """What an iterator of chunks gives, as a file to read once."""

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
        taken = min(len(buffer), len(self._rest))
        buffer[:taken], self._rest = self._rest[:taken], self._rest[taken:]
        return taken


@contextmanager
def archive(engine: ContainerEngine, container: str, path: str) -> Generator[tarfile.TarFile]:
    """What is at a path of a container as a tar archive to be read once, its root named by the path's last part.

    Raises Missing, and what the library raises.
    """
    response = engine.get(f"/containers/{container}/archive", stream=True, path=os.fsencode(path))
    with closing(response):
        file = io.BufferedReader(_Stream(response.iter_content(1 << 18)), 1 << 18)
        with tarfile.open(
            fileobj=cast(IO[bytes], file), mode="r|", encoding="utf-8", errors="surrogateescape"
        ) as tar:
            yield tar


def read(engine: ContainerEngine, container: str, path: str, *, limit: int) -> bytes:
    """The content of a regular file, links followed inside. Raises FileNotFoundError, SandboxError."""
    with engine_errors(f"read {path} in the sandbox"):
        for _ in range(_MOST_LINKS):
            status = engine.stat(container, path)
            if status is None:
                raise FileNotFoundError(2, "no such file in the sandbox", path)
            mode = int(status["mode"])
            if not mode & _LINK:
                break
            path = posixpath.join(posixpath.dirname(path), str(status["linkTarget"]))
        else:
            raise SandboxError(f"cannot read {path} in the sandbox: too many links")
        if mode & (_DIRECTORY | _OTHER):
            raise SandboxError(f"cannot read {path} in the sandbox: expected a regular file")
        try:
            with archive(engine, container, path) as tar:
                member = tar.next()
                file = tar.extractfile(member) if member is not None and member.isreg() else None
                if member is None or file is None:
                    raise SandboxError(f"cannot read {path} in the sandbox: expected a regular file")
                if member.size > limit:
                    raise SandboxError(f"cannot read {path} in the sandbox: it is larger than {limit} bytes")
                return file.read()
        except EngineNotFound as error:
            raise FileNotFoundError(2, "no such file in the sandbox", path) from error
        except tarfile.TarError as error:
            raise SandboxError(f"cannot read {path} in the sandbox: {error}") from error


def write(engine: ContainerEngine, container: str, path: str, data: bytes, *, mode: int, user: int) -> None:
    """Write a regular file with its parent directories, owned by `user`. Raises SandboxError."""
    with engine_errors(f"write {path} in the sandbox"):
        status = engine.stat(container, path)
        if status is not None and int(status["mode"]) & (_DIRECTORY | _OTHER):
            raise SandboxError(f"cannot write {path} in the sandbox: expected a regular file at this path")
        new_directories: list[str] = []
        parent = posixpath.dirname(path)
        while (parent_status := engine.stat(container, parent)) is None and parent != "/":
            new_directories.insert(0, posixpath.basename(parent))
            parent = posixpath.dirname(parent)
        if parent_status is not None and not int(parent_status["mode"]) & (_DIRECTORY | _LINK):
            raise SandboxError(f"cannot write {path} in the sandbox: {parent} is not a directory")
        output = io.BytesIO()
        with tarfile.open(fileobj=output, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for depth in range(1, len(new_directories) + 1):
                tar.addfile(_owned("/".join(new_directories[:depth]), 0o755, user, tarfile.DIRTYPE))
            info = _owned("/".join((*new_directories, posixpath.basename(path))), mode, user, tarfile.REGTYPE)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        try:
            engine.api.put_archive(container, parent, output.getvalue())
        except EngineNotFound as error:
            raise SandboxError(f"cannot write {path} in the sandbox: {error}") from error


def _owned(name: str, mode: int, user: int, kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.uid, info.gid = kind, mode, user, user
    return info


def is_program(engine: ContainerEngine, container: str, path: str) -> bool:
    """Whether an executable regular file is at `path`, links followed."""
    for _ in range(_MOST_LINKS):
        status = engine.stat(container, path)
        if status is None:
            return False
        mode = int(status["mode"])
        if not mode & _LINK:
            return not mode & (_DIRECTORY | _OTHER) and bool(mode & 0o111)
        path = posixpath.join(posixpath.dirname(path), str(status["linkTarget"]))
    return False


def missing_loader(engine: ContainerEngine, container: str, path: str) -> str:
    """The interpreter or dynamic loader that a program names and that is not there; empty when all is well.

    Raises FileNotFoundError, SandboxError.
    """
    match = _LOADER.match(_beginning(engine, container, path))
    loader = (match[1] or match[2]).decode(errors="replace") if match else ""
    return loader if loader and engine.stat(container, loader) is None else ""


def _beginning(engine: ContainerEngine, container: str, path: str) -> bytes:
    with engine_errors(f"read {path} in the sandbox"), archive(engine, container, path) as tar:
        member = tar.next()
        file = tar.extractfile(member) if member is not None and member.isreg() else None
        return file.read(4096) if file is not None else b""


def is_directory(engine: ContainerEngine, container: str, path: str) -> bool:
    """Whether a directory is at `path`, links followed."""
    status = engine.stat(container, path)
    return status is not None and bool(int(status["mode"]) & (_DIRECTORY | _LINK))


def is_plain_directory(status: Mapping[str, Any]) -> bool:
    """Whether what the engine found is a directory, and no link to one."""
    return bool(int(status["mode"]) & _DIRECTORY)


def is_special(status: Mapping[str, Any]) -> bool:
    """Whether what the engine found is a device, a pipe or a socket."""
    return bool(int(status["mode"]) & _OTHER)


def executable(member: tarfile.TarInfo) -> bool:
    """Whether git would call a file executable."""
    return bool(member.mode & stat.S_IXUSR)
