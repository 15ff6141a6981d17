"""How much space a store takes, and what can be removed from it.

Runs share contents and conversations, so what a run takes by itself is known only once it is removed: contents
that no row refers to any more are then removed too. All removals need a store that nobody else has open
(`Store.open` with `exclusive`), because writers cache the ids of contents, and readers read in several
transactions. An interrupted removal leaves a consistent store, and repeating it continues.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
from msgspec import Struct
from sqlalchemy import (
    ColumnElement,
    Index,
    PrimaryKeyConstraint,
    ScalarSelect,
    Select,
    Table,
    Text,
    UniqueConstraint,
    case,
    delete,
    func,
    literal,
    select,
    true,
    union,
    update,
)

from understudy.errors import StoreError
from understudy.store.calls import PRUNED_REQUEST
from understudy.store.contents import EMPTY, content_hash, split_body, stored_bytes
from understudy.store.database import Repository, WriteContext, queued
from understudy.store.schema import (
    attempts,
    blobs,
    calls,
    keys,
    logs,
    metadata,
    nodes,
    rewards,
    rollouts,
    runs,
    tasks,
    token_values,
    turns,
    votes,
)
from understudy.store.statements import json_field, json_values
from understudy.types import ENDED

_BATCH = 5_000
_NO_RUNS: Collection[str] = ()
_TOKEN_COLUMNS = [calls.c[name] for name in ("suffix", "completion", "logprobs")]
_TOKEN_VALUE_COLUMNS = [token_values.c[name] for name in ("logprobs", "ratios", "advantages")]
_PRUNED_SKELETON = split_body(PRUNED_REQUEST).skeleton


class RunSpace(Struct, frozen=True, kw_only=True):
    """The bytes that belong to a run alone. Contents are not included, because other runs may share them.

    `ended`: all its rollouts have ended. `changed_at` (Unix seconds): when the last of them changed. `pruned`
    counts the calls whose request and response were removed. `wave` is set for a training loop's run in a
    database.
    """

    run_id: str
    wave: str | None = None
    created_at: float
    changed_at: float
    ended: bool
    rollouts: int
    calls: int = 0
    pruned: int = 0
    token_bytes: int = 0
    value_bytes: int = 0


class UnusedContents(Struct, frozen=True):
    """Contents that no row refers to: how many, and their size in bytes."""

    contents: int = 0
    bytes: int = 0


class SpaceRepository(Repository):
    """`Store.space`: how much space is used, and its removal."""

    def file_size(self) -> tuple[int, int | None]:
        """Return the bytes that the store takes on disk, and how many of them are unused (None: unknown)."""
        with self._database.driver.errors():
            return self._database.driver.file_size()

    def runs(self) -> list[RunSpace]:
        """Return the runs, oldest first."""
        open_ = func.sum(case((rollouts.c.status.in_(ENDED), 0), (rollouts.c.id.is_(None), 0), else_=1))
        query = (
            select(
                runs.c.id.label("run_id"),
                json_field(runs.c.config, "wave").label("wave"),
                runs.c.created_at,
                func.coalesce(func.max(rollouts.c.updated_at), runs.c.created_at).label("changed_at"),
                (open_ == 0).label("ended"),
                func.count(rollouts.c.id).label("rollouts"),
            )
            .outerjoin(rollouts, rollouts.c.run_id == runs.c.id)
            .group_by(runs.c.id, runs.c.created_at)
            .order_by(runs.c.created_at, runs.c.id)
        )
        pruned = case((calls.c.skeleton_id == _pruned_skeleton(), 1), else_=0)
        of_calls = _by_run(
            func.count().label("calls"),
            func.sum(pruned).label("pruned"),
            _size(_TOKEN_COLUMNS).label("token_bytes"),
        )
        of_values = _by_run(_size(_TOKEN_VALUE_COLUMNS).label("value_bytes"))
        of_values = of_values.join(token_values, token_values.c.call_id == calls.c.id)
        with self._reading() as connection:
            sizes: dict[str, dict[str, int]] = {}
            for statement in (of_calls, of_values):
                for row in connection.execute(statement).mappings():
                    sizes.setdefault(row["run_id"], {}).update(
                        {name: row[name] for name in row if name != "run_id"}
                    )
            rows = connection.execute(query).mappings().all()
        return [
            RunSpace(**{**row, "ended": bool(row["ended"])}, **sizes.get(row["run_id"], {}))  # pyright: ignore
            for row in rows
        ]

    def unused(
        self, without_runs: Collection[str] = _NO_RUNS, without_bodies: Collection[str] = _NO_RUNS
    ) -> UnusedContents:
        """Return the contents that no row refers to, or would refer to without some runs or the bodies of some
        runs' calls.
        """
        query = select(func.count(), func.coalesce(func.sum(stored_bytes()), 0)).where(
            blobs.c.id.not_in(_referenced_contents(without_runs, without_bodies))
        )
        with self._reading() as connection:
            return UnusedContents(*connection.execute(query).one())

    def remove(
        self,
        runs_to_remove: Collection[str] = _NO_RUNS,
        bodies: Collection[str] = _NO_RUNS,
        values: Collection[str] = _NO_RUNS,
        report: Callable[[str], None] = lambda line: None,
    ) -> UnusedContents:
        """Remove some runs, the bodies of other runs' calls, or trainers' values; then contents that no row refers
        to.

        Each run is removed in one transaction, contents a few thousand at a time. Returns the contents that were
        removed.
        """
        with self._indexed_references():
            for change, run_ids in (
                (self._drop_run, runs_to_remove),
                (self._drop_bodies, bodies),
                (self._drop_values, values),
            ):
                for run_id in run_ids:
                    report(f"run {run_id}")
                    change(run_id).result()
            return self._sweep(report)

    def compact(self) -> str:
        """Return unused space to the file system. Returns why that was not done, or "" if it was."""
        with self._database.driver.errors():
            return self._database.driver.compact()

    # --- what is removed -------------------------------------------------------------------------------

    @queued
    def _drop_run(self, context: WriteContext, run_id: str) -> None:
        own_rollouts = select(rollouts.c.id).where(rollouts.c.run_id == run_id)
        execute, own_attempts = context.connection.execute, _attempts_of((run_id,))
        _drop_values(context, run_id)
        execute(delete(votes).where(votes.c.subject == "rollout", votes.c.subject_id.in_(own_rollouts)))
        for table in (calls, logs, rewards, keys):
            execute(delete(table).where(table.c.attempt_id.in_(own_attempts)))
        execute(delete(attempts).where(attempts.c.rollout_id.in_(own_rollouts)))
        for table in (rollouts, tasks):
            execute(delete(table).where(table.c.run_id == run_id))
        execute(delete(runs).where(runs.c.id == run_id))
        context.forget()

    @queued
    def _drop_bodies(self, context: WriteContext, run_id: str) -> None:
        """Replace the requests and responses of a run by a note.

        Logs of attempts, which repeat them, are deleted.
        """
        note = {"understudy": "pruned", "at": time.strftime("%Y-%m-%d", time.gmtime())}
        skeleton = context.contents.blob(_PRUNED_SKELETON)
        values = {
            "skeleton_id": skeleton,
            "response_id": context.contents.blob(msgspec.json.encode(note)),
            "system_id": None,
            "tools_id": None,
            "node_id": EMPTY,
        }
        own_attempts = _attempts_of((run_id,))
        unpruned = calls.c.attempt_id.in_(own_attempts) & (calls.c.skeleton_id != skeleton)
        context.connection.execute(update(calls).where(unpruned).values(values))
        context.connection.execute(delete(logs).where(logs.c.attempt_id.in_(own_attempts)))
        context.forget()

    @queued
    def _drop_values(self, context: WriteContext, run_id: str) -> None:
        _drop_values(context, run_id)

    def _sweep(self, report: Callable[[str], None]) -> UnusedContents:
        """Delete unreferenced nodes, then contents.

        Higher ids go first, so that no remaining node ever lacks its parent.
        """
        for table, living in ((nodes, _used_nodes(_NO_RUNS)), (blobs, _referenced_contents(_NO_RUNS, _NO_RUNS))):
            query = select(table.c.id).where(table.c.id.not_in(living)).order_by(table.c.id.desc())
            with self._reading() as connection:
                unused = array("q", connection.execute(query).scalars())
            size = 0
            for start in range(0, len(unused), _BATCH):
                size += self._delete(table, unused[start : start + _BATCH]).result()
                report(f"{min(start + _BATCH, len(unused))} of {len(unused)} {_NOUNS[table.name]}")
        return UnusedContents(len(unused), size)

    @queued
    def _delete(self, context: WriteContext, table: Table, ids: Sequence[int]) -> int:
        is_chosen = table.c.id.in_(json_values(ids))
        size = 0
        if table is blobs:
            size = context.connection.execute(select(func.sum(stored_bytes())).where(is_chosen)).scalar_one()
        context.connection.execute(delete(table).where(is_chosen))
        context.forget()
        return size

    @contextmanager
    def _indexed_references(self) -> Generator[None]:
        self._index_references().result()
        try:
            yield
        except BaseException:
            # The original error is raised even if the connection is lost; the next removal drops the indexes.
            with suppress(StoreError):
                self._drop_indexes().result()
            raise
        self._drop_indexes().result()

    @queued
    def _index_references(self, context: WriteContext) -> None:
        """Create indexes on references.

        Without them, deleting a row reads whole tables to check for references to it.
        """
        for name, table, column in _unindexed_references():
            context.connection.exec_driver_sql(f"CREATE INDEX IF NOT EXISTS {name} ON {table} ({column})")

    @queued
    def _drop_indexes(self, context: WriteContext) -> None:
        for name, _, _ in _unindexed_references():
            context.connection.exec_driver_sql(f"DROP INDEX IF EXISTS {name}")


_NOUNS = {"nodes": "messages of conversations", "blobs": "contents"}


def _attempts_of(run_ids: Collection[str]) -> Select[tuple[str]]:
    query = select(attempts.c.id).join(rollouts, rollouts.c.id == attempts.c.rollout_id)
    return query.where(rollouts.c.run_id.in_(json_values(sorted(run_ids), Text)))


def _drop_values(context: WriteContext, run_id: str) -> None:
    own_calls = select(calls.c.id).where(calls.c.attempt_id.in_(_attempts_of((run_id,))))
    context.connection.execute(delete(token_values).where(token_values.c.call_id.in_(own_calls)))


def _by_run(*columns: ColumnElement[Any]) -> Select[Any]:
    """Select sums over the calls of each run."""
    return (
        select(rollouts.c.run_id, *columns)
        .select_from(rollouts)
        .join(attempts, attempts.c.rollout_id == rollouts.c.id)
        .join(calls, calls.c.attempt_id == attempts.c.id)
        .group_by(rollouts.c.run_id)
    )


def _size(columns: Sequence[ColumnElement[Any]]) -> ColumnElement[int]:
    """Sum the bytes in some columns over all rows."""
    return func.sum(sum((func.coalesce(func.length(column), 0) for column in columns), literal(0)))


def _pruned_skeleton() -> ScalarSelect[int]:
    """Select the content that is the skeleton of a pruned request."""
    return select(blobs.c.id).where(blobs.c.hash == content_hash(_PRUNED_SKELETON)).scalar_subquery()


def _used_nodes(run_ids: Collection[str]) -> Select[Any]:
    """Select the nodes of all conversations, except those of the calls of some runs."""
    ends = [select(calls.c.node_id.label("id")).where(_not_of(calls.c.attempt_id, run_ids))]
    ends += [select(turns.c[name].label("id")) for name in ("node_id", "answer_id")]
    living = select(union(*ends).subquery().c.id).cte("living", recursive=True)
    living = living.union(select(nodes.c.parent_id).join(living, nodes.c.id == living.c.id))
    return select(living.c.id).where(living.c.id.is_not(None))


def _referenced_contents(without_runs: Collection[str], without_bodies: Collection[str]) -> Select[Any]:
    """Select the contents that rows refer to, ignoring rows of some runs, and the calls and logs of others."""
    without_calls = {*without_runs, *without_bodies}
    ignored_runs = {calls: without_calls, logs: without_calls, attempts: without_runs, rewards: without_runs}
    named: list[Select[Any]] = []
    for table in metadata.sorted_tables:
        for column in table.columns:
            if not column.references(blobs.c.id):
                continue
            query = select(column.label("id")).where(column.is_not(None))
            if table is nodes:
                query = query.where(nodes.c.id.in_(_used_nodes(without_calls)))
            elif table is tasks:
                query = query.where(tasks.c.run_id.not_in(json_values(sorted(without_runs), Text)))
            elif table in ignored_runs:
                owner = table.c.id if table is attempts else table.c.attempt_id
                query = query.where(_not_of(owner, ignored_runs[table]))
            named.append(query)
    return select(union(*named).subquery().c.id)


def _not_of(attempt: ColumnElement[str], run_ids: Collection[str]) -> ColumnElement[bool]:
    return attempt.not_in(_attempts_of(run_ids)) if run_ids else true()


def _unindexed_references() -> Iterator[tuple[str, str, str]]:
    """Yield columns that refer to other tables and that no index begins with: (name for an index, table,
    column).
    """
    for table in metadata.sorted_tables:
        keys_ = [*table.constraints, *table.indexes]
        indexed = {
            next(iter(key.columns)).name for key in keys_ if isinstance(key, _INDEX_TYPES) and len(key.columns)
        }
        for column in table.columns:
            if column.foreign_keys and column.name not in indexed:
                yield f"prune_{table.name}_{column.name}", table.name, column.name


_INDEX_TYPES = (PrimaryKeyConstraint, UniqueConstraint, Index)
