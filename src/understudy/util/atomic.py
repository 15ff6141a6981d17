"""Files and directories that are replaced as a whole: a reader finds the old content or the new, never half of it.

What is new is written beside its target under a hidden name and renamed into place at the end.

- After a kill (SIGKILL, out of memory) the target is whole, with or without `fsync`: renaming is atomic, and the
  kernel still has what was written. At worst a hidden leftover, `.*.new` or `.*.old`, lies beside it.
- After a power cut only what was written with `fsync=True` is sure to be there. Without it the file system may
  have recorded the rename before the data: the target may then be empty or cut short. That is enough for what the
  same command makes again (exports, reports, pages), not for what a run or a loop goes on from.
- A directory cannot be exchanged in one system call. Between two renames the target is missing, and the old
  directory lies beside it as `.*.old`; a process that is killed in that moment leaves it so.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def atomic_path(target: Path, *, fsync: bool = False, temporary: Path | None = None) -> Generator[Path]:
    """A path to create a file or a directory at; it replaces `target` when the block ends without an exception.

    If the block raises, `target` stays as it was and what was written is removed. See the module for what `fsync`
    is for. `temporary` is the path to write at, on the same file system as `target`; without it that is a new
    name beside `target`, so that several processes may write at once. A fixed name is for a single writer that
    wants to find, or to overwrite, what a kill left of it. Raises OSError.
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
                with suppress(OSError):  # Where nothing can be written, nothing can be removed either.
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
    for each in (*path.rglob("*"), path, path.parent):
        _sync(each)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
