"""Opens files of a sandbox from outside, without following a path out of it.

The kernel resolves paths with the sandbox's root as "/" (openat2, RESOLVE_IN_ROOT), so neither a link nor a race
can lead out. During that the thread has the file-system identity of the sandbox's user, and no more rights.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
from collections.abc import Generator, Mapping
from pathlib import PurePosixPath

from understudy.errors import SandboxError
from understudy.sandbox.process import read_regular
from understudy.util.files import write_remedy

SYS_OPENAT2 = 437  # the same number on every architecture
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_IN_ROOT = 0x10


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_libc = ctypes.CDLL(None, use_errno=True)


def open_in(root: int, path: str, flags: int, mode: int = 0) -> int:
    """Return a descriptor of `path`, resolved with the directory `root` as "/". Raises OSError."""
    how = _OpenHow(flags | os.O_CLOEXEC, mode, RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS)
    while True:
        descriptor = _libc.syscall(
            ctypes.c_long(SYS_OPENAT2),
            ctypes.c_int(root),
            ctypes.c_char_p(os.fsencode(path)),
            ctypes.byref(how),
            ctypes.c_size_t(ctypes.sizeof(how)),
        )
        if descriptor >= 0:
            return int(descriptor)
        code = ctypes.get_errno()
        # EAGAIN: something was renamed while the kernel resolved the path, so try again.
        if code not in (errno.EAGAIN, errno.EINTR):
            raise OSError(code, os.strerror(code), path)


@contextlib.contextmanager
def _acting_as(user: int | None) -> Generator[None]:
    """Give this thread the file-system identity of `user` inside the block; None changes nothing."""
    if user is None:
        yield
        return
    group_before, user_before = _libc.setfsgid(user), _libc.setfsuid(user)
    try:
        yield
    finally:
        _libc.setfsuid(user_before)
        _libc.setfsgid(group_before)


def file_mode(root: int, path: str) -> int | None:
    """Return the mode bits of `path`, with links followed; None if there is nothing."""
    try:
        descriptor = open_in(root, path, os.O_PATH)
    except OSError:
        return None
    try:
        return os.fstat(descriptor).st_mode
    finally:
        os.close(descriptor)


def read(root: int, path: str, limit: int, user: int | None) -> bytes:
    """Return the content of a regular file.

    Raises FileNotFoundError, and SandboxError when it has more than `limit` bytes or cannot be read.
    """
    try:
        with _acting_as(user):
            descriptor = open_in(root, path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(errno.ENOENT, "no such file in the sandbox", path) from error
    except OSError as error:
        raise SandboxError(
            f"cannot read {path} in the sandbox: {error.strerror}; expected a file that the user of the sandbox "
            "can read: make it readable (chmod), or give another path"
        ) from error
    return read_regular(descriptor, path, limit)


def _make_directory(root: int, path: PurePosixPath) -> None:
    """Create a directory and its parents, as `mkdir -p`. Raises OSError."""
    mode = file_mode(root, str(path))
    if mode is not None and stat.S_ISDIR(mode):
        return
    if mode is not None:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    _make_directory(root, path.parent)
    parent = open_in(root, str(path.parent), os.O_PATH | os.O_DIRECTORY)
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path.name, 0o755, dir_fd=parent)
    finally:
        os.close(parent)


def make_directory(root: int, path: str, user: int | None) -> None:
    """Create a directory with its parents, unless it exists. Raises SandboxError."""
    try:
        with _acting_as(user):
            _make_directory(root, PurePosixPath(path))
    except OSError as error:
        raise SandboxError(
            f"cannot create the directory {path} in the sandbox: {error.strerror}; "
            f"{write_remedy(error, 'give a path below a directory that the user of the sandbox can write')}"
        ) from error


def make_mount_point(root: int, path: str, *, directory: bool) -> None:
    """Create an empty directory or file as a mount point, unless the path exists. Raises SandboxError."""
    if directory:
        make_directory(root, path, None)
    elif file_mode(root, path) is None:
        write(root, path, b"", 0o444, None)


def write_first(root: int, contents: Mapping[str, bytes]) -> None:
    """Write files, by their path below `root`, that everyone may read. Raises SandboxError.

    Only before the sandbox has run a command: nothing there can be a link then, so this takes a third of the time
    of `write`.
    """
    for path, data in contents.items():
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            try:
                descriptor = os.open(path, flags, 0o644, dir_fd=root)
            except FileNotFoundError:
                _make_directory(root, PurePosixPath("/", path).parent)
                descriptor = os.open(path, flags, 0o644, dir_fd=root)
            try:
                os.fchmod(descriptor, 0o644)
                unwritten = memoryview(data)
                while unwritten:
                    unwritten = unwritten[os.write(descriptor, unwritten) :]
            finally:
                os.close(descriptor)
        except OSError as error:
            remedy = write_remedy(error, "check this machine with `understudy doctor`")
            raise SandboxError(
                f"cannot write /{path} in a new sandbox: {error.strerror}; {remedy}, then run the same command "
                "again"
            ) from error


def write(root: int, path: str, data: bytes, mode: int, user: int | None) -> None:
    """Write a regular file with its parent directories. Raises SandboxError."""
    try:
        with _acting_as(user):
            _make_directory(root, PurePosixPath(path).parent)
            flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY
            descriptor = open_in(root, path, flags, mode)
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.close(descriptor)
                raise SandboxError(
                    f"cannot write {path} in the sandbox: there is a special file; expected a regular file, or "
                    "none: choose another path"
                )
            with os.fdopen(descriptor, "wb") as file:
                os.fchmod(descriptor, mode)
                file.truncate(0)
                file.write(data)
    except OSError as error:
        raise SandboxError(
            f"cannot write {path} in the sandbox: {error.strerror}; "
            f"{write_remedy(error, 'give a path of a regular file that the user of the sandbox can write')}"
        ) from error
