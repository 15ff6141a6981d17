"""One process at a time: what is made once in the cache, and the directory of a run."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from understudy.errors import ConfigError

_CACHE = "set UNDERSTUDY_CACHE to a directory that you can write"


@contextmanager
def locked(path: Path, *, busy: str = "", remedy: str = _CACHE) -> Generator[int]:
    """Hold an exclusive lock on the file `path`, which is made when absent and stays.

    Gives its descriptor: a process that inherits it holds the lock too. The kernel drops the lock when its last
    holder dies. Waits for another holder, unless `busy` says what to tell then.
    Raises ConfigError with `busy`, or with `remedy` when the file cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be made: {error.strerror}; {remedy}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy else 0))
        except BlockingIOError:
            raise ConfigError(busy) from None
        yield descriptor
    finally:
        os.close(descriptor)


def make_readable(root: Path) -> None:
    """Let every user read `root` and all below it; links are left alone.

    A sandbox's user is another one than ours, and a strict umask would shut it out.
    """
    for directory, names, files in os.walk(root):
        for name in (".", *names, *files):
            path = Path(directory, name)
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode):
                continue
            wanted = mode | 0o444 | (0o111 if stat.S_ISDIR(mode) or mode & 0o100 else 0)
            if wanted != mode:
                path.chmod(stat.S_IMODE(wanted))
