"""The cache: what can be made or fetched again, and since when nobody used it."""

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
from understudy.config import CACHE_LOCK
from understudy.report.directories import VIEW_INDEXES
from understudy.util.files import locked

_KINDS = {
    **dict.fromkeys((*AGENT_PACKAGES, "claude-sdk", "runtimes"), "agents"),
    "envs": "environments of tasks",
    **dict.fromkeys(("trees", "checks", "records"), "trees of tasks"),
    "sdists": "packages",
    "models": "models",
    **dict.fromkeys(("remote/files", "remote/trees-*"), "files of ssh sandboxes"),
    VIEW_INDEXES: "indexes of the viewer",
}
"""The directories of the cache whose entries can go, and what they are. What was measured of tasks stays."""

_REMOVING = ".removing-"
_OF_DATABASES = ("-wal", "-shm")


class CacheEntry(Struct, frozen=True, kw_only=True):
    """Something in the cache that goes as a whole, and when it was used last (Unix seconds, as far as known)."""

    kind: str
    path: Path
    bytes: int
    used_at: float


def cache_entries(cache: Path) -> Iterator[CacheEntry]:
    """What is in the cache and can be made or fetched again."""
    for pattern, kind in _KINDS.items():
        for path in sorted(each for directory in cache.glob(pattern) for each in _entries(directory)):
            if path.name.endswith((".lock", *_OF_DATABASES)) or path.name.startswith("."):
                continue
            with suppress(FileNotFoundError):
                yield CacheEntry(
                    kind=kind, path=path, bytes=sum(map(tree_bytes, _files(path))), used_at=_used_at(path)
                )


def _used_at(path: Path) -> float:
    return max(each.lstat().st_mtime for each in _files(path))


def _files(path: Path) -> list[Path]:
    """An entry, and beside it the log of a database, whose time is later than its own."""
    return [path, *(each for end in _OF_DATABASES if (each := path.with_name(path.name + end)).exists())]


def _entries(directory: Path) -> Iterator[Path]:
    try:
        with os.scandir(directory) as inner:
            yield from (Path(each.path) for each in inner)
    except OSError:
        return


def tree_bytes(path: Path) -> int:
    """The bytes on disk of a file, or of a directory with all below it; what has several names counts once."""
    seen: set[tuple[int, int]] = set()
    total, left = 0, [path]
    while left:
        each = left.pop()
        try:
            status = each.lstat()
            if stat.S_ISDIR(status.st_mode):
                left += _entries(each)
        except OSError:
            continue  # gone meanwhile, or not ours to look at
        if (identity := (status.st_dev, status.st_ino)) not in seen:
            seen.add(identity)
            total += status.st_blocks * 512
    return total


def remove_entries(cache: Path, entries: list[CacheEntry]) -> list[CacheEntry]:
    """Remove entries, and what a removal that was killed has left; returns those that are gone.

    One that was used or made anew since it was looked at stays. Raises ConfigError while sandboxes are open,
    models of the cache are used, or something is being put into the cache.
    """
    busy = (
        f"the cache {cache} is in use: a run, a worker or another command has sandboxes open or uses a model; "
        "wait for it, then run the same command again"
    )
    removed: list[CacheEntry] = []
    with locked(cache / CACHE_LOCK, busy=busy):
        for path in cache.glob(f"{_REMOVING}*"):
            _remove(path)
        for entry in entries:
            busy = f"{entry.path} is being made; wait for it, then run the same command again"
            with locked(_lock_of(entry), busy=busy), suppress(FileNotFoundError):
                if _used_at(entry.path) > entry.used_at:
                    continue
                removed.append(entry)
                for path in _files(entry.path):
                    # Away at once: what is found there afterwards is whole.
                    aside = cache / f"{_REMOVING}{uuid.uuid4().hex[:12]}"
                    with suppress(FileNotFoundError):
                        path.rename(aside)
                        _remove(aside)
    return removed


def _lock_of(entry: CacheEntry) -> Path:
    """The lock of who puts it there (`agents/install.py`, `model/pretrained.py`, and who makes the others)."""
    path = entry.path
    if path.parent.name in AGENT_PACKAGES:
        return path.parent / ".lock"
    return path.with_name(f".{path.name}.lock") if entry.kind == "models" else path.with_suffix(".lock")


def _remove(path: Path) -> None:
    """Remove a file, or a directory in which there may be directories that cannot be written, as in task trees."""
    if not path.is_dir() or path.is_symlink():
        path.unlink()
        return
    for folder, _, _ in os.walk(path):
        os.chmod(folder, 0o700)  # noqa: PTH101 (a Path each is twice the time)
    shutil.rmtree(path)
