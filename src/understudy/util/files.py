"""Files and directories: replaced as a whole, locked, and made readable for other users."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import shutil
import stat
import tarfile
import uuid
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from understudy.errors import ConfigError


@contextmanager
def atomic_path(target: Path, *, fsync: bool = False, temporary: Path | None = None) -> Generator[Path]:
    """Yield a path for a new file or directory, which replaces `target` if the block ends without an exception.

    If the block raises, `target` stays as it was and what was written is removed. With `fsync` the file survives
    a power cut. `temporary` is the path to yield, on the same file system as `target`; the default is a new name
    beside `target`, so that several processes may write at once. A fixed name is for a single writer, which can
    then find, or overwrite, what a killed process left there. Raises OSError.
    """
    new = target.with_name(f".{uuid.uuid4().hex[:12]}.new") if temporary is None else temporary
    old = new.with_suffix(".old")
    try:
        yield new
        if fsync:
            for path in (*new.rglob("*"), new):
                _sync(path)
        if target.is_dir() and not target.is_symlink():
            target.rename(old)
        try:
            new.rename(target)
        except OSError:
            if old.exists():
                old.rename(target)
            raise
        if fsync:
            _sync(target.parent)
    finally:
        for leftover in (new, old):
            if leftover.is_dir():
                shutil.rmtree(leftover)
            else:
                with suppress(OSError):  # The directory is read-only, so the file stays.
                    leftover.unlink(missing_ok=True)


def atomic_write(
    target: Path, content: bytes, *, fsync: bool = False, mode: int | None = None, temporary: Path | None = None
) -> None:
    """Replace the file `target` by one with this content.

    `mode` is the file's permissions, whatever the umask, and holds from the moment the file exists; without it the
    umask decides. `fsync` and `temporary` are those of `atomic_path`. Raises OSError.
    """
    with atomic_path(target, fsync=fsync, temporary=temporary) as path:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags, 0o666 if mode is None else mode & 0o600), "wb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(content)


def sync_tree(path: Path) -> None:
    """Make a file, or a directory with everything below it, survive a power cut. Raises OSError."""
    for entry in (*path.rglob("*"), path, path.parent):
        _sync(entry)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_FULL = (errno.ENOSPC, errno.EDQUOT)


def write_remedy(error: OSError, otherwise: str) -> str:
    """Return what to do about a file or directory that could not be written: if the disk is full, or a quota is
    used up, to free some space, otherwise `otherwise`.
    """
    return "free some space there" if error.errno in _FULL else otherwise


_CACHE_REMEDY = "set UNDERSTUDY_CACHE to a directory that you can write"


@contextmanager
def locked(path: Path, *, busy: str = "", remedy: str = _CACHE_REMEDY) -> Generator[int]:
    """Hold an exclusive lock on the file `path`, which is made when absent and stays.

    Gives its descriptor: a process that inherits it holds the lock too. The kernel drops the lock when its last
    holder dies. Waits for another holder, unless `busy` says what to tell then.
    Raises ConfigError with `busy`, or with `remedy` when the file cannot be made.
    """
    descriptor = open_lock(path, remedy)
    try:
        if not busy:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        elif not lock_now(descriptor):
            raise ConfigError(busy)
        yield descriptor
    finally:
        os.close(descriptor)


def open_lock(path: Path, remedy: str = _CACHE_REMEDY) -> int:
    """Return a descriptor of a file to lock, which is created if it is missing. Raises ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(f"{path.parent}: is below a file or is one, expected a directory; {remedy}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be created: {error.strerror}; {write_remedy(error, remedy)}") from error


def lock_now(descriptor: int) -> bool:
    """Lock an open file as `locked` does, until the descriptor is closed; return whether nobody else has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


_shared_locks: dict[Path, int] = {}


def share_lock(path: Path) -> None:
    """Hold a shared lock on a file until this process ends; an exclusive lock waits for that.

    For a file of another user, reading permission is enough. If the file cannot be created, nothing is locked.
    """
    if path in _shared_locks:
        return
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            _shared_locks[path] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError:
            _shared_locks[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(_shared_locks[path], fcntl.LOCK_SH)


def mark_used(cache: Path, paths: Iterable[Path]) -> None:
    """Update the modification time of cache entries (`KIND/NAME`), which records that they are in use now."""
    for path in paths:
        if path.is_relative_to(cache):
            with suppress(OSError):  # the entry may belong to another user
                os.utime(cache.joinpath(*path.relative_to(cache).parts[:2]))


def make_readable(root: Path) -> None:
    """Make `root` and everything below it readable for all users; links are left alone.

    Sandboxes run as another user than we do, whom a strict umask would shut out.
    """
    for directory, names, files in os.walk(root):
        for name in (".", *names, *files):
            path = Path(directory, name)
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode):
                continue
            readable_mode = mode | 0o444 | (0o111 if stat.S_ISDIR(mode) or mode & 0o100 else 0)
            if readable_mode != mode:
                path.chmod(stat.S_IMODE(readable_mode))


def tar_of(members: Mapping[str, bytes]) -> bytes:
    """Return a tar archive of regular files, given by path."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()
