"""The stores below the directories that the viewer was given: which there are, and each one open for reading."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Literal

from understudy.errors import ConfigError
from understudy.report.read import is_loop
from understudy.store import Store
from understudy.store.sqlite import FILE, ChangeCounter
from understudy.view.faults import ViewRefused, missing

_DEPTH: Final = 6
_MOST: Final = 5_000
_OF_A_LOOP: Final = ("steps", "evaluations")
_SKIPPED: Final = frozenset({"node_modules", "__pycache__", "rollouts", "weights"})

Stamp = tuple[int, ...]
"""Changes whenever a store's file does."""


class ViewedStore:
    """One directory with a store, or with a loop. `name` is its path below the directory that was given."""

    def __init__(self, directory: Path, name: str, kind: Literal["store", "loop"], parent_id: str | None) -> None:
        self.id = store_id(directory)
        self.directory = directory
        self.name = name
        self.kind = kind
        self.parent_id = parent_id
        self._lock = threading.Lock()
        self._store: Store | None = None
        self._counter: ChangeCounter | None = None
        self._file: tuple[int, int] | None = None

    def stamp(self) -> Stamp:
        """What changes with every write: sizes and times of the files; empty when the store is gone."""
        names = ("state.json", "loop.json", "metrics.jsonl") if self.kind == "loop" else (FILE, f"{FILE}-wal")
        stamp: list[int] = []
        for name in names:
            try:
                status = (self.directory / name).stat()
            except OSError:
                continue
            stamp += (status.st_ino, status.st_size, status.st_mtime_ns)
        return tuple(stamp)

    def reading(self) -> Store:
        """The store, open for reading alone; opened again where another file is in its place.

        Raises ViewRefused where it is gone, StoreError where it cannot be read.
        """
        with self._lock:
            self._check_file()
            if self._store is None:
                self._store = Store.open(self.directory, create=False, read_only=True)
            return self._store

    def changes(self) -> int:
        """A number that differs after every change by another process. Raises as `reading`."""
        with self._lock:
            self._check_file()
            if self._counter is None:
                self._counter = ChangeCounter(self.directory / FILE)
            return self._counter.read()

    def _check_file(self) -> None:
        """Let go of a file that was deleted or replaced: SQLite would go on reading it."""
        try:
            status = (self.directory / FILE).stat()
        except OSError as error:
            self._release()
            raise missing(
                f"{self.directory} holds no store any more ({FILE}: {error.strerror})",
                "it was deleted or moved; reload the list of stores",
            ) from error
        if self._file != (status.st_dev, status.st_ino):
            self._release()
            self._file = (status.st_dev, status.st_ino)

    def close(self) -> None:
        """Let go of the file."""
        with self._lock:
            self._release()

    def _release(self) -> None:
        store, self._store = self._store, None
        counter, self._counter = self._counter, None
        self._file = None
        if store is not None:
            store.close()
        if counter is not None:
            counter.close()


def store_id(directory: Path) -> str:
    """Ten hex digits that follow from a directory's path."""
    return hashlib.sha256(os.fsencode(directory)).hexdigest()[:10]


class Catalog:
    """The stores below some directories. Nothing outside of these is ever opened, through no link either.

    Raises ConfigError for a directory that is not there.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = [root.resolve() for root in roots]
        for root in self.roots:
            if not root.is_dir():
                raise ConfigError(f"{root} is not a directory; give one that a run, a loop or a gateway wrote to")
        self._lock = threading.Lock()
        self._stores: dict[str, ViewedStore] = {}

    def scan(self) -> list[ViewedStore]:
        """Look for stores again; those there are, by directory. One that vanished can still be asked for by id."""
        stores: dict[str, ViewedStore] = {}
        for root in self.roots:
            for store in _walk(root, root, 0, None):
                stores.setdefault(store.id, store)
                if len(stores) >= _MOST:
                    break
        with self._lock:
            for key, store in stores.items():
                self._stores.setdefault(key, store)
            return [self._stores[key] for key in stores]

    def store(self, key: str) -> ViewedStore:
        """The store with an id. Raises ViewRefused where there is none."""
        with self._lock:
            existing = self._stores.get(key)
        if existing is None:
            self.scan()
            with self._lock:
                existing = self._stores.get(key)
        if existing is None:
            raise missing(f"no store has the id {key[:100]!r}", "reload the list of stores")
        if not self._is_inside(existing.directory):
            raise ViewRefused(
                403,
                "outside",
                f"{existing.directory} leads out of the directories that are viewed",
                "start the viewer with its directory",
            )
        return existing

    def _is_inside(self, directory: Path) -> bool:
        """Whether a directory is still below the given ones, now that links are followed."""
        try:
            real = directory.resolve()
        except OSError:
            return False
        return any(real.is_relative_to(root) for root in self.roots)

    def close(self) -> None:
        """Let go of all stores."""
        with self._lock:
            stores = list(self._stores.values())
        for store in stores:
            store.close()


def _walk(directory: Path, root: Path, depth: int, loop: str | None) -> Iterator[ViewedStore]:
    """The stores in a directory and below. Links are not followed."""
    name = str(directory.relative_to(root)) if directory != root else root.name
    has_loop = is_loop(directory)
    if has_loop:
        yield ViewedStore(directory, name, "loop", None)
        loop = store_id(directory)
    elif _is_plain_file(directory / FILE):
        yield ViewedStore(directory, name, "store", loop)
        return
    if depth >= _DEPTH:
        return
    try:
        inner = sorted(
            Path(entry.path)
            for entry in os.scandir(directory)
            if entry.is_dir(follow_symlinks=False)
            and not entry.name.startswith(".")
            and entry.name not in _SKIPPED
        )
    except OSError:
        return  # one that this user may not read has nothing to show
    for path in inner:
        if not has_loop or path.name in _OF_A_LOOP:
            yield from _walk(path, root, depth + 1, loop)


def _is_plain_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()
