"""Finds the stores and loops below a directory."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from msgspec import Struct

from understudy.config import cache_dir
from understudy.report.read import is_loop
from understudy.store.address import StoreLocation
from understudy.store.sqlite import FILE

VIEW_INDEXES: Final = "view"
_MAX_DEPTH: Final = 6
_WAVE_DIRECTORIES: Final = ("steps", "evaluations")
_SKIPPED: Final = frozenset({"node_modules", "__pycache__", "rollouts", "weights"})


class StoreDirectory(Struct, frozen=True):
    """A directory with a store in it, or a loop; `loop` is the directory of the loop that a store belongs to."""

    path: Path
    is_loop: bool
    loop: Path | None


def store_id(location: StoreLocation) -> str:
    """Return ten hex digits that identify a directory's real path, or a database's URL without its password."""
    path = location.resolve() if isinstance(location, Path) else location
    return hashlib.sha256(os.fsencode(str(path))).hexdigest()[:10]


def index_file(identity: str) -> Path:
    """Return the path of the viewer's index of a store, by the store's id."""
    return cache_dir() / VIEW_INDEXES / f"{identity}.db"


def find_stores(root: Path) -> Iterator[StoreDirectory]:
    """Yield the stores and loops in a directory and below it. Links are not followed."""
    yield from _find_stores_below(root, 0, None)


def loop_around(directory: Path) -> Path | None:
    """Return the real path of the loop that a directory's step or evaluation belongs to; links are followed."""
    for path in (directory.absolute(), directory.resolve()):
        for ancestor in (path, *path.parents):
            if ancestor.name in _WAVE_DIRECTORIES and is_loop(ancestor.parent):
                return ancestor.parent.resolve()
    return None


def _find_stores_below(directory: Path, depth: int, loop: Path | None) -> Iterator[StoreDirectory]:
    has_loop = is_loop(directory)
    if has_loop:
        yield StoreDirectory(directory, True, None)
        loop = directory
    elif _is_plain_file(directory / FILE):
        yield StoreDirectory(directory, False, loop)
        return
    if depth >= _MAX_DEPTH:
        return
    try:
        subdirectories = sorted(
            Path(entry.path)
            for entry in os.scandir(directory)
            if entry.is_dir(follow_symlinks=False)
            and not entry.name.startswith(".")
            and entry.name not in _SKIPPED
        )
    except OSError:
        return  # a directory that this user may not read is skipped
    for path in subdirectories:
        if not has_loop or path.name in _WAVE_DIRECTORIES:
            yield from _find_stores_below(path, depth + 1, loop)


def _is_plain_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()
