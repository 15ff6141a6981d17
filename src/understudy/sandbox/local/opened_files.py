"""Counts how often files are opened, by whatever program, from outside of the sandbox in which that happens."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections import Counter
from collections.abc import Sequence

_INIT_FLAGS = os.O_CLOEXEC | os.O_NONBLOCK
_OPEN, _CLOSE = 0x20, 0x08 | 0x10  # IN_OPEN; IN_CLOSE_WRITE and IN_CLOSE_NOWRITE
_OVERFLOW = 0x4000
_EVENT = struct.Struct("iIII")  # watch, mask, cookie, length of the name, which is empty for a file


class OpenedFiles:
    """Counts opens of files, from when it is made until it is closed, by inotify.

    Closing a file is watched too, because the kernel joins equal events that follow each other.
    """

    def __init__(self, root: int, paths: Sequence[str]) -> None:
        """Watch `paths`, which are absolute below the directory of the descriptor `root`. Raises OSError."""
        self._call = ctypes.CDLL(None, use_errno=True)
        self._paths: dict[int, str] = {}
        self._descriptor = self._result(self._call.inotify_init1(_INIT_FLAGS))
        try:
            for path in paths:
                inside = os.fsencode(f"/proc/self/fd/{root}{path}")
                watch = self._result(self._call.inotify_add_watch(self._descriptor, inside, _OPEN | _CLOSE))
                self._paths[watch] = path
        except OSError:
            self.close()
            raise

    def _result(self, result: int) -> int:
        if result < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return result

    def counts(self) -> dict[str, int] | None:
        """Return how often each path was opened since the last call; None if the kernel lost count."""
        counts: Counter[str] = Counter()
        lost = False
        with contextlib.suppress(BlockingIOError):
            while True:
                raw = os.read(self._descriptor, 1 << 16)
                for watch, mask, _, _ in _EVENT.iter_unpack(raw):
                    lost |= bool(mask & _OVERFLOW)
                    if mask & _OPEN and watch in self._paths:
                        counts[self._paths[watch]] += 1
        return None if lost else dict(counts)

    def close(self) -> None:
        """Stop counting."""
        os.close(self._descriptor)
