"""Decides which data of stores and loops can be removed, by the age of runs and the number to keep.

Never removed: unfinished runs, what a loop needs to continue, and data of stores that others have open.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Literal

from msgspec import Struct, field

from understudy.disk.caches import tree_bytes
from understudy.errors import ConfigError, StoreError
from understudy.report.directories import find_stores, index_file, loop_around, store_id
from understudy.store import Store
from understudy.store.address import StoreLocation, StoreUrl
from understudy.store.bucket_contents import GRACE_S, UnneededObjects
from understudy.store.space import RunSpace
from understudy.train.loop.state import LoopConfig, LoopDirectory, prune, read_json, removable
from understudy.util.files import locked

Droppable = Literal["runs", "bodies", "token-values"]
LOST: dict[Droppable, str] = {
    "runs": "the runs with their rollouts, calls, patches, verdicts and labels",
    "bodies": "the requests, responses and agents' logs: no transcript, export or training of them any more; "
    "outcomes, patches, verdicts, tokens and costs stay",
    "token-values": "what trainers computed for tokens (logprobs, ratios, advantages), which the viewer shows",
}
"""What can be removed of runs that have ended, and what is lost with it."""


class Retention(Struct, frozen=True, kw_only=True):
    """What to remove: `drop` of the runs that have not changed for `older_than_s` seconds and are not among the
    `keep_runs` newest ones; a loop counts as one run.
    """

    drop: frozenset[Droppable] = frozenset()
    older_than_s: float = 0.0
    keep_runs: int = 0


class PrunedStore(Struct, frozen=True, kw_only=True):
    """What pruning removes from a store or a loop, as planned or as done.

    `runs` are run ids by the part that is dropped, `weights` the removed checkpoints, and `bytes` the space in the
    database, its bucket or the files. `stays` counts the runs that are kept, by reason. `note` says what could not
    be done, `skipped` why nothing was.
    """

    location: str
    runs: dict[Droppable, list[str]] = field(default_factory=dict[Droppable, list[str]])
    weights: list[str] = field(default_factory=list[str])
    bytes: int = 0
    stays: dict[str, int] = field(default_factory=dict[str, int])
    note: str = ""
    skipped: str = ""


class FoundStore(Struct, frozen=True):
    """A store, and the real path of the loop that it belongs to."""

    location: StoreLocation
    loop: Path | None = None


def stores_of(locations: Iterable[StoreLocation]) -> tuple[list[FoundStore], list[Path]]:
    """Return the stores and loops at these locations, each once. Raises ConfigError for a missing directory."""
    stores: dict[StoreLocation, FoundStore] = {}
    loops: dict[Path, Path] = {}
    for location in locations:
        if isinstance(location, StoreUrl):
            stores.setdefault(location, FoundStore(location))
            continue
        if not location.is_dir():
            raise ConfigError(
                f"{location} is not a directory; give one that a run or a loop wrote to, or the URL of a database"
            )
        outer = loop_around(location)
        for found_store in find_stores(location):
            if found_store.is_loop:
                loops.setdefault(found_store.path.resolve(), found_store.path)
            else:
                loop = found_store.loop.resolve() if found_store.loop else outer
                stores.setdefault(found_store.path.resolve(), FoundStore(found_store.path, loop))
    return list(stores.values()), list(loops.values())


class Pruner:
    """Decides what is removed from some stores, and removes it."""

    def __init__(self, stores: Sequence[FoundStore], retention: Retention, report: Callable[[str], None]) -> None:
        self._stores = stores
        self._retention = retention
        self._report = report
        self._before = time.time() - retention.older_than_s
        self._unread: dict[StoreLocation, str] = {}
        """Why stores could not be listed: which of their runs are among the newest is not known."""
        self._older = self._find_older() if retention.drop and retention.keep_runs else None

    def _find_older(self) -> set[object]:
        """Return the runs that are not among the newest: all of a loop's, or a run of a store. Runs created since
        then stay.
        """
        created: dict[object, float] = {}
        for found_store in self._stores:
            try:
                with Store.open(found_store.location, create=False, read_only=True) as store:
                    for run in store.space.runs():
                        owner = _owner(found_store, run)
                        created[owner] = max(created.get(owner, 0.0), run.created_at)
            except StoreError as error:
                self._unread[found_store.location] = str(error)
        newest = sorted(created, key=lambda owner: created[owner], reverse=True)
        unread = {found_store.loop for found_store in self._stores if found_store.location in self._unread}
        return set(newest[self._retention.keep_runs :]) - unread

    def plan(self) -> Iterator[PrunedStore]:
        """Yield what would be removed from each store, without removing it."""
        return self._prune_each("reading", self._plan)

    def remove(self) -> Iterator[PrunedStore]:
        """Remove what `plan` shows, and yield what was removed from each store.

        A store that others have open is left alone; `skipped` then says so.
        """
        return self._prune_each("pruning", self._remove)

    def _prune_each(self, doing: str, prune: Callable[[FoundStore], PrunedStore]) -> Iterator[PrunedStore]:
        for found_store in self._stores:
            error = self._unread.get(found_store.location)
            if error is None:
                self._report(f"{doing} {found_store.location}")
                try:
                    yield prune(found_store)
                    continue
                except (StoreError, ConfigError) as refused:
                    error = str(refused)
            yield PrunedStore(location=str(found_store.location), skipped=error)

    def _plan(self, target: FoundStore) -> PrunedStore:
        with Store.open(target.location, create=False, read_only=True) as store:
            runs, stays = self._choose(target, store)
            unused = store.space.unused(runs.get("runs", ()), runs.get("bodies", ()))
            sizes = _own_bytes(store.space.runs(), runs)
            objects = store.bucket.unneeded()
        size = unused.bytes + sizes + objects.bytes
        return PrunedStore(
            location=str(target.location), runs=runs, stays=stays, bytes=size, note=_too_new(objects)
        )

    def _remove(self, target: FoundStore) -> PrunedStore:
        with ExitStack() as alone:
            if target.loop is not None:
                alone.enter_context(_alone_in_loop(target.loop))
            store = alone.enter_context(Store.open(target.location, create=False, exclusive=True))
            before, _ = store.space.file_size()
            runs, stays = self._choose(target, store)
            if runs.get("runs") or runs.get("bodies"):
                # The viewer's index contains texts that are removed now. It goes first, so that no interruption
                # leaves it behind.
                for end in ("", "-wal", "-shm"):
                    file = index_file(store_id(target.location))
                    file.with_name(file.name + end).unlink(missing_ok=True)
            store.space.remove(
                runs.get("runs", ()), runs.get("bodies", ()), runs.get("token-values", ()), self._report
            )
            self._report(f"giving back what {target.location} does not need")
            note = store.space.compact()
            after, _ = store.space.file_size()
            objects = store.bucket.unneeded(remove=True)
        return PrunedStore(
            location=str(target.location),
            runs=runs,
            stays=stays,
            note="; ".join(filter(None, (note, _too_new(objects)))),
            bytes=max(0, before - after) + objects.bytes,
        )

    def _choose(self, target: FoundStore, store: Store) -> tuple[dict[Droppable, list[str]], dict[str, int]]:
        """Return the runs of which something is removed, and the reasons why others stay."""
        chosen: dict[Droppable, list[str]] = {}
        stays = Counter[str]()
        needed = None if target.loop is None else _needed_by_loop(target)
        for run in store.space.runs() if self._retention.drop else ():
            reason = needed or self._reason_to_stay(target, run)
            if reason:
                stays[reason] += 1
                continue
            for what in sorted(self._retention.drop):
                if what == "runs" or not _is_gone(run, what):
                    chosen.setdefault(what, []).append(run.run_id)
        if "runs" in chosen:
            chosen = {"runs": chosen["runs"]}
        return chosen, dict(stays)

    def _reason_to_stay(self, target: FoundStore, run: RunSpace) -> str:
        if not run.ended:
            return "not ended"
        if run.wave is not None:
            return "of a training loop, which may go on with it"
        if self._older is not None and _owner(target, run) not in self._older:
            return f"among the newest {self._retention.keep_runs}"
        if run.changed_at > self._before:
            return "changed too recently"
        return ""


def _too_new(objects: UnneededObjects) -> str:
    if not objects.too_new:
        return ""
    return (
        f"{objects.too_new} objects in the bucket that nothing refers to are less than {GRACE_S / 60:.0f} minutes "
        "old; a later prune removes them"
    )


def _owner(target: FoundStore, run: RunSpace) -> object:
    if isinstance(target.location, StoreUrl):
        return run.run_id  # One database may be given by several URLs.
    return target.loop or (target.location, run.run_id)


def _is_gone(run: RunSpace, what: Droppable) -> bool:
    return run.calls == run.pruned if what == "bodies" else run.value_bytes == 0


def _own_bytes(runs: Collection[RunSpace], chosen: dict[Droppable, list[str]]) -> int:
    """Return the bytes of rows that belong to one run only."""
    dropped_runs, dropped_values = chosen.get("runs", []), chosen.get("token-values", [])
    return sum(
        (run.token_bytes + run.value_bytes if run.run_id in dropped_runs else 0)
        + (run.value_bytes if run.run_id in dropped_values else 0)
        for run in runs
    )


# --- loops ---------------------------------------------------------------------------------------------


def _alone_in_loop(root: Path) -> AbstractContextManager[int]:
    return locked(
        LoopDirectory(root).lock,
        busy=f"the loop in {root} is running; wait for it, then run the same command again",
        remedy="let its owner do this",
    )


def _needed_by_loop(target: FoundStore) -> str:
    """Return why a loop still needs a store of its waves or evaluations; "" if it does not. Raises StoreError."""
    assert target.loop is not None and isinstance(target.location, Path)
    directory = LoopDirectory(target.loop)
    state = directory.load()
    if state is None:
        return "of a loop that has not begun"
    wave_directories = {directory.run(ref.wave) for ref in state.pending()}
    wave_directories |= {directory.run(step.step) for step in state.steps if step.phase != "published"}
    wave_paths = {directory.run(step.step) for step in state.steps}
    wave_paths |= {directory.absolute(evaluation.run) for evaluation in state.evaluations}
    location = target.location.resolve()
    wave_paths = {directory.resolve() for directory in wave_paths} - {
        directory.resolve() for directory in wave_directories
    }
    return "" if location in wave_paths else "its loop goes on with it"


def prune_loop(root: Path, keep: int | None, *, dry_run: bool) -> PrunedStore:
    """Remove the weights of all but the last `keep` steps (None: as the loop is configured), and leftovers of
    kills.
    """
    directory = LoopDirectory(root)
    try:
        with _alone_in_loop(root):
            state, config = directory.load(), read_json(root / "loop.json", LoopConfig)
            if state is None or config is None:
                return PrunedStore(location=str(root), skipped="the loop has not begun")
            keep = config.keep if keep is None else keep
            removed = removable(directory, state, keep)
            freed = sum(map(tree_bytes, removed))
            if not dry_run:
                prune(directory, state, keep)
    except (StoreError, ConfigError) as error:
        return PrunedStore(location=str(root), skipped=str(error))
    return PrunedStore(location=str(root), weights=[str(path.relative_to(root)) for path in removed], bytes=freed)
