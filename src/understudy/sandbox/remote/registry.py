"""A registry of sandboxes in a directory: lists them, and ends those past their deadline."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import msgspec
from msgspec import Struct

from understudy.sandbox.base import OpenSandbox
from understudy.sandbox.process import has_ended, process_stamp
from understudy.util.files import atomic_write


class _RegistryEntry(Struct, frozen=True):
    sandbox: OpenSandbox
    worker: str
    """The `process_stamp` of the process with which the sandbox ends."""


class SandboxRegistry:
    """A directory with one file for each open sandbox. Files that a killed worker left are removed.

    Sandboxes are ended by sending `end_signal` to their workers.
    """

    def __init__(self, directory: Path, end_signal: signal.Signals = signal.SIGKILL) -> None:
        self._directory = directory
        self._end_signal = end_signal

    def add(self, sandbox: OpenSandbox, pid: int) -> None:
        """Register a sandbox that the process `pid` serves. Raises OSError."""
        self._directory.mkdir(parents=True, exist_ok=True)
        entry = _RegistryEntry(sandbox, process_stamp(pid))
        atomic_write(self._directory / f"{sandbox.id}.json", msgspec.json.encode(entry), mode=0o600)

    def remove(self, sandbox_id: str) -> None:
        """Unregister a sandbox that was closed."""
        (self._directory / f"{sandbox_id}.json").unlink(missing_ok=True)

    def sandboxes(self) -> list[OpenSandbox]:
        """Return the open sandboxes, the oldest first."""
        return sorted((entry.sandbox for entry in self._entries()), key=lambda sandbox: sandbox.opened)

    def reap(self, ids: list[str]) -> list[str]:
        """End these sandboxes, and all past their deadline; return their ids."""
        ended: list[str] = []
        for entry in self._entries():
            if entry.sandbox.id in ids or entry.sandbox.deadline < time.time():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(entry.worker.split("-")[1]), self._end_signal)
                self.remove(entry.sandbox.id)
                ended.append(entry.sandbox.id)
        return ended

    def _entries(self) -> list[_RegistryEntry]:
        entries: list[_RegistryEntry] = []
        for path in self._directory.glob("*.json"):
            try:
                entry = msgspec.json.decode(path.read_bytes(), type=_RegistryEntry)
            except FileNotFoundError:
                continue
            if has_ended(entry.worker):
                path.unlink(missing_ok=True)
            else:
                entries.append(entry)
        return entries
