"""The cache: its entries, which can all be made or fetched again, and when they were used last."""

from __future__ import annotations

import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from understudy.agents.packages import AGENT_PACKAGES
from understudy.checks.twins.templates import VERSIONS
from understudy.config import CACHE_LOCK
from understudy.report.directories import VIEW_INDEXES
from understudy.util.files import locked

_KINDS = {
    **dict.fromkeys((*AGENT_PACKAGES, "claude-sdk", "runtimes"), "agents"),
    "envs": "environments of tasks",
    **dict.fromkeys(("trees", "checks", "records"), "trees of tasks"),
    VERSIONS: "versions of tests",
    "sdists": "packages",
    "models": "models",
    **dict.fromkeys(("remote/files", "remote/trees-*"), "files of remote sandboxes"),
    VIEW_INDEXES: "indexes of the viewer",
}
"""The directories of the cache whose entries can be removed, and what they contain. Measurements of tasks are
kept.
"""

_REMOVAL_PREFIX = ".removing-"
_DATABASE_LOG_SUFFIXES = ("-wal", "-shm")


class CacheEntry(Struct, frozen=True, kw_only=True):
    """An entry of the cache that is removed as a whole, and when it was last used (Unix seconds, if known)."""

    kind: str
    path: Path
    bytes: int
    used_at: float


def cache_entries(cache: Path) -> Iterator[CacheEntry]:
    """Yield the entries of the cache that can be made or fetched again."""
    for pattern, kind in _KINDS.items():
        for path in sorted(entry for directory in cache.glob(pattern) for entry in _entries(directory)):
            if path.name.endswith((".lock", *_DATABASE_LOG_SUFFIXES)) or path.name.startswith("."):
                continue
            with suppress(FileNotFoundError):
                yield CacheEntry(
                    kind=kind, path=path, bytes=sum(map(tree_bytes, _files(path))), used_at=_used_at(path)
                )


def _used_at(path: Path) -> float:
    return max(file.lstat().st_mtime for file in _files(path))


def _files(path: Path) -> list[Path]:
    """Return an entry's files: for a database also its log, which is modified later than the database itself."""
    return [
        path,
        *(companion for end in _DATABASE_LOG_SUFFIXES if (companion := path.with_name(path.name + end)).exists()),
    ]


def _entries(directory: Path) -> Iterator[Path]:
    try:
        with os.scandir(directory) as listing:
            yield from (Path(entry.path) for entry in listing)
    except OSError:
        return


def tree_bytes(path: Path) -> int:
    """Return the disk usage in bytes of a file or a directory tree; hard links count once."""
    counted: set[tuple[int, int]] = set()
    total, pending = 0, [path]
    while pending:
        entry = pending.pop()
        try:
            status = entry.lstat()
            if stat.S_ISDIR(status.st_mode):
                pending += _entries(entry)
        except OSError:
            continue  # deleted meanwhile, or not readable by us
        if (identity := (status.st_dev, status.st_ino)) not in counted:
            counted.add(identity)
            total += status.st_blocks * 512
    return total


def remove_entries(cache: Path, entries: list[CacheEntry]) -> list[CacheEntry]:
    """Remove entries, and leftovers of interrupted removals; return the removed ones.

    An entry that was used or made again since it was listed is kept. Raises ConfigError while sandboxes are open,
    models of the cache are in use, or something is being put into the cache.
    """
    busy = (
        f"the cache {cache} is in use: a run, a worker or another command has sandboxes open or uses a model; "
        "wait for it, then run the same command again"
    )
    removed: list[CacheEntry] = []
    with locked(cache / CACHE_LOCK, busy=busy):
        for path in cache.glob(f"{_REMOVAL_PREFIX}*"):
            _remove(path)
        for entry in entries:
            busy = f"{entry.path} is being made; wait for it, then run the same command again"
            with locked(_lock_of(entry), busy=busy), suppress(FileNotFoundError):
                if _used_at(entry.path) > entry.used_at:
                    continue
                removed.append(entry)
                for path in _files(entry.path):
                    # Renamed first, in one step, so that whatever is found at the path later is complete.
                    removed_path = cache / f"{_REMOVAL_PREFIX}{uuid.uuid4().hex[:12]}"
                    with suppress(FileNotFoundError):
                        path.rename(removed_path)
                        _remove(removed_path)
    return removed


def _lock_of(entry: CacheEntry) -> Path:
    """Return the lock of the code that creates the entry (`agents/install.py`, `model/pretrained.py`, and
    others).
    """
    path = entry.path
    if path.parent.name in AGENT_PACKAGES:
        return path.parent / ".lock"
    return path.with_name(f".{path.name}.lock") if entry.kind == "models" else path.with_suffix(".lock")


def _remove(path: Path) -> None:
    """Remove a file or a directory, even if it contains read-only directories, as task trees do."""
    if not path.is_dir() or path.is_symlink():
        path.unlink()
        return
    for folder, _, _ in os.walk(path):
        os.chmod(folder, 0o700)  # noqa: PTH101 (a Path each is twice the time)
    shutil.rmtree(path)
