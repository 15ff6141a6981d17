"""The stores that the viewer shows: those below the given directories, and the given databases."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from understudy.errors import ConfigError
from understudy.report.directories import find_stores, store_id
from understudy.store.address import StoreLocation, StoreUrl
from understudy.view.faults import ViewRefused, not_found
from understudy.view.open_store import ViewedDatabase, ViewedDirectory, ViewedStore

_log = logging.getLogger(__name__)
_MAX_STORES: Final = 5_000


class Catalog:
    """The stores below some directories, and in some databases.

    Nothing outside of the directories is ever opened, not even through links. Raises ConfigError if a directory
    does not exist, StoreError if a database cannot be read. At most `max_stores` stores are shown; it is logged
    once if there are more.
    """

    def __init__(self, locations: Sequence[StoreLocation], max_stores: int = _MAX_STORES) -> None:
        self._max_stores = max_stores
        self._has_warned = False
        self.roots = [location.resolve() for location in locations if isinstance(location, Path)]
        for root in self.roots:
            if not root.is_dir():
                raise ConfigError(
                    f"{root} {'is not a directory' if root.exists() else 'does not exist'}; give a directory that "
                    "a run, a loop or a gateway wrote to"
                )
        self._databases = [ViewedDatabase(location) for location in locations if isinstance(location, StoreUrl)]
        self._lock = threading.Lock()
        self._stores: dict[str, ViewedStore] = {}
        try:
            for database in self._databases:
                self._stores[database.id] = database
                database.reading()
        except BaseException:
            self.close()
            raise

    @property
    def locations(self) -> list[StoreLocation]:
        """The directories and databases that are shown."""
        return [*self.roots, *(database.url for database in self._databases)]

    def scan(self) -> list[ViewedStore]:
        """Search for stores again, and return those that exist.

        A store that vanished can still be requested by id.
        """
        stores: dict[str, ViewedStore] = {database.id: database for database in self._databases}
        for root in self.roots:
            for entry in find_stores(root):
                name = str(entry.path.relative_to(root)) if entry.path != root else root.name
                loop = None if entry.loop is None else store_id(entry.loop)
                store = ViewedDirectory(entry.path, name, "loop" if entry.is_loop else "store", loop)
                if store.id not in stores and len(stores) >= self._max_stores:
                    self._warn_of_limit(root)
                    break
                stores.setdefault(store.id, store)
        with self._lock:
            for key, store in stores.items():
                self._stores.setdefault(key, store)
            return [self._stores[key] for key in stores]

    def _warn_of_limit(self, root: Path) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "only the first %d stores are shown; to see others, start `understudy view` with directories in "
                "%s",
                self._max_stores,
                root,
            )

    def store(self, key: str) -> ViewedStore:
        """Return the store with an id. Raises ViewRefused if there is none."""
        with self._lock:
            existing = self._stores.get(key)
        if existing is None:
            self.scan()
            with self._lock:
                existing = self._stores.get(key)
        if existing is None:
            raise not_found(f"no store has the id {key[:100]!r}", "reload the list of stores")
        if isinstance(existing, ViewedDirectory) and not self._is_inside(existing.directory):
            raise ViewRefused(
                403,
                "outside",
                f"{existing.directory} is outside of the directories that the viewer was started with",
                "restart `understudy view` with its directory",
            )
        return existing

    def _is_inside(self, directory: Path) -> bool:
        """Return whether a directory is still below the given ones, after following links."""
        try:
            real = directory.resolve()
        except OSError:
            return False
        return any(real.is_relative_to(root) for root in self.roots)

    def close(self) -> None:
        """Close all stores."""
        with self._lock:
            stores = list(self._stores.values())
        for store in stores:
            store.close()
