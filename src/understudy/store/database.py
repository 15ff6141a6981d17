"""The connections of a store, its single writer, which all repositories share, and columns that hold JSON."""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import msgspec
from msgspec import Struct
from sqlalchemy import Connection, RowMapping, Select

from understudy.errors import BucketUnavailable, StoreError
from understudy.store.bucket import Bucket, bucket_of, read_setting
from understudy.store.contents import ContentWriter, Parts, read_blobs
from understudy.store.decoding import decoder
from understudy.store.driver import OUTAGE_S, DatabaseDriver
from understudy.store.outage_retry import FIRST_PAUSE_S, MAX_PAUSE_S
from understudy.store.tokens import Ids, RecentTokens
from understudy.types import ErrorInfo, Finding

R = TypeVar("R", bound="Repository")
P = ParamSpec("P")
T = TypeVar("T")
Row = RowMapping | Mapping[str, Any]

encode = msgspec.json.Encoder().encode
canonical = msgspec.json.Encoder(order="sorted").encode
decode_object = decoder(dict[str, Any], "a configuration")
_error = decoder(ErrorInfo, "the error of an attempt or rollout")
_findings = decoder(tuple[Finding, ...], "an attempt's list of findings")


def error_column(error: ErrorInfo | None) -> bytes | None:
    """Encode an error for its column. Invalid Unicode in its message (as in a file name) is replaced."""
    if error is None:
        return None
    return encode(msgspec.structs.replace(error, message=_valid_unicode(error.message)))


def read_error(column: bytes | None) -> ErrorInfo | None:
    """Decode the error in a column. If that is damaged, the damage is the error: all else can still be read."""
    try:
        return None if column is None else _error(column)
    except StoreError as damage:
        return ErrorInfo("store", "StoreError", str(damage))


def findings_column(findings: Sequence[Finding]) -> bytes:
    """Encode findings for their column. Invalid Unicode in their messages is replaced."""
    return encode(
        [msgspec.structs.replace(finding, message=_valid_unicode(finding.message)) for finding in findings]
    )


def read_findings(column: bytes | None) -> tuple[Finding, ...]:
    """Decode the findings in a column."""
    return () if column is None else _findings(column)


def json_column(encoder: Callable[[object], bytes], value: object, description: str) -> bytes:
    """Encode a value as JSON. Raises StoreError, naming it as `description`, if it cannot be encoded."""
    try:
        return encoder(value)
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        raise StoreError(
            f"{description} cannot be written as JSON: {error}; give numbers, strings, lists and objects, without "
            "NaN"
        ) from error


def row_reader(kind: type[T], **decoders: Callable[[Any], Any]) -> Callable[[Row], T]:
    """Return a function that reads a row into a struct with the same field names; `decoders` decode the named
    columns.
    """

    def read(row: Row) -> T:
        fields: dict[str, Any] = {**row, **{name: decode(row[name]) for name, decode in decoders.items()}}
        return kind(**fields)

    return read


def _valid_unicode(text: str) -> str:
    return text.encode(errors="replace").decode()


GROUP = 256
"""The most writes in one transaction, which bounds how long the first of them waits."""

GATHER_S = 0.0002
"""How long to wait for more writes after a group of several: clients that were answered together return
together.
"""


class InsertedCall(Struct, frozen=True):
    """The row of a call, the row that its tokens build on, and its packed prompt and completion, if it has any."""

    key: int
    base: int | None
    ids: Ids | None


class WriteContext:
    """What a write works with: the session, its SQLAlchemy connection, and the contents."""

    def __init__(self, driver: DatabaseDriver, name: str) -> None:
        self.session = driver.open_session(name)
        self.connection = self.session.connection
        self.contents = ContentWriter(self.session, bucket_of(self.connection))
        self.recent = RecentTokens()
        self.token_bases: dict[str, int | None] = {}
        """The rows on which the tokens of calls after a call build, by its id; for recent calls."""
        self.locked_statuses: dict[str, str] = {}
        """Statuses of attempts that cannot change before this transaction ends."""
        self.inserted_calls: dict[int, InsertedCall] = {}
        """The calls that this transaction has inserted together, by Python's `id` of each."""
        self.split_requests: dict[int, Parts] = {}
        """The requests of calls that are stored in this transaction, by Python's `id` of each call: two calls may
        claim the same id of their own."""

    def end_transaction(self) -> None:
        """Clear what holds for one transaction only."""
        self.locked_statuses.clear()
        self.split_requests.clear()
        self.inserted_calls.clear()

    def end_commit(self) -> None:
        """Clear what holds for one transaction only, after its commit."""
        self.end_transaction()
        self.contents.end_transaction()

    def forget(self) -> None:
        """Clear all caches, after a rollback."""
        self.end_transaction()
        self.contents.forget()
        self.recent.clear()
        self.token_bases.clear()

    def close(self) -> None:
        """Return the connection to the pool."""
        self.session.close()


Prepare = Callable[[WriteContext, Sequence[Any]], None]
"""Does together what several writes of one kind have in common, given one value of each."""


class _QueuedWrite(Generic[T]):
    def __init__(self, work: Callable[[WriteContext], T], prepare: Prepare | None, value: object) -> None:
        self.work = work
        self.prepare = prepare
        self.value = value
        self.future: Future[T] = Future()
        self.result: T | None = None
        self.group = 0


class Writer:
    """Runs writes in the order in which they were queued, in a thread that starts with the first write.

    If the connection is lost, writes wait for a new one, for as long as the driver says. A write that needs an
    unavailable bucket, and those after it, wait for the bucket for the same time. Two writers of one driver have
    different names.
    """

    def __init__(self, driver: DatabaseDriver, name: str = "") -> None:
        self._driver = driver
        self._name = name
        self._context: WriteContext | None = None
        self._group = 0
        self._queue: queue.SimpleQueue[_QueuedWrite[Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(
        self, work: Callable[[WriteContext], T], prepare: Prepare | None = None, value: object = None
    ) -> Future[T]:
        """Queue a write. Its future resolves once the write is durable, or fails with a StoreError.

        If several writes with the same `prepare` are committed together and the database is a server, it is called
        with their values before the first of them, in the same transaction. Cancelling the future before the
        write's turn drops the write. Raises StoreError after `close`.
        """
        write = _QueuedWrite(work, prepare, value)
        with self._lock:
            if self._closed:
                raise StoreError(
                    f"{self._driver.name} is closed, so nothing more can be written; open it again with Store.open"
                )
            if self._thread is None:
                # A daemon thread lets a program end that forgot to close the store. Every acknowledged write is
                # durable then.
                self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
                self._thread.start()
            self._queue.put(write)
        return write.future

    def close(self) -> None:
        """Finish the queued writes and end the thread."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
            if thread is not None:
                self._queue.put(None)
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        group: list[_QueuedWrite[Any]] = []
        open_ = True
        while open_:
            item = self._queue.get()
            if len(group) > 1:
                time.sleep(GATHER_S)
            group = []
            while item is not None:
                if item.future.set_running_or_notify_cancel():
                    group.append(item)
                if len(group) >= GROUP:
                    break
                try:
                    item = self._queue.get_nowait()
                except queue.Empty:
                    break
            open_ = item is not None
            self._write(group)
        if self._context is not None:
            self._context.close()

    def _write(self, group: list[_QueuedWrite[Any]]) -> None:
        """Commit a group of writes, or fail their futures. After a temporary error the group is tried again."""
        began, pause_s = time.monotonic(), FIRST_PAUSE_S
        while pending := [write for write in group if not write.future.done()]:
            try:
                self._context = self._context or WriteContext(self._driver, self._name)
                together = len({write.group for write in pending}) == 1
                for writes in [pending] if together else [[write] for write in pending]:
                    self._commit(self._context, writes)
            except Exception as error:  # noqa: BLE001 - the writer outlives it; who waits is told
                if self._context is not None:
                    self._context.close()
                    self._context = None
                if time.monotonic() - began + pause_s > self._repeatable_for_s(error):
                    pending = [write for write in pending if not write.future.done()]
                    # Only one write waits for the bucket: others may not need it.
                    self._fail(pending[:1] if isinstance(error, BucketUnavailable) else pending, error)
                    continue
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def _commit(
        self,
        context: WriteContext,
        group: list[_QueuedWrite[Any]],
    ) -> None:
        """Run a group of writes in one transaction. If one of them fails, which is rare, each is run by itself.

        Raises errors that need a new connection. It is then unknown whether writes without a result were
        committed.
        """
        session = context.session
        # A group that is tried again keeps its number, by which the driver recognises that it was committed
        # before.
        if not (earlier_number := group[0].group):
            self._group += 1
        number, has_begun = earlier_number or self._group, False
        try:
            is_new = session.begin(number)
            has_begun = True
            if is_new:
                _run_together(context, group)
            if context.contents.uploads:
                # Not within the transaction, whose locks others would wait for.
                session.rollback()
                context.forget()
                context.contents.upload()
                session.begin(number)
                _run_together(context, group)
            for write in group:
                write.group = number
            session.commit(number)
            context.end_commit()
        except Exception as error:
            # In a group, those before the one that needs the bucket do not wait for it.
            is_passing = self._repeatable_for_s(error) > 0
            if is_passing and (len(group) == 1 or not isinstance(error, BucketUnavailable)):
                raise
            session.rollback()
            context.forget()
            for write in group:
                write.group = 0
            if len(group) == 1 or not has_begun:
                self._fail(group, error)
            else:
                for write in group:
                    self._commit(context, [write])
            return
        for write in group:
            write.future.set_result(write.result)

    def _repeatable_for_s(self, error: Exception) -> float:
        return OUTAGE_S if isinstance(error, BucketUnavailable) else self._driver.repeatable_for_s(error)

    def _fail(self, group: list[_QueuedWrite[Any]], error: Exception) -> None:
        store_error = self._driver.store_error(error)
        for write in group:
            if not write.future.done():
                write.future.set_exception(store_error)


def _run_together(context: WriteContext, group: Sequence[_QueuedWrite[Any]]) -> None:
    """Run the writes of a group in the transaction that has begun."""
    _prepare_together(context, group)
    for write in group:
        write.result = write.work(context)


def _prepare_together(context: WriteContext, group: Sequence[_QueuedWrite[Any]]) -> None:
    """Prepare a group of writes of one kind. Other writes between them could change what they rely on."""
    prepare = group[0].prepare
    if (
        context.session.is_remote
        and prepare
        and len(group) > 1
        and {write.prepare for write in group} == {prepare}
    ):
        prepare(context, [write.value for write in group])


class Database:
    """An open store: its driver and its writer."""

    def __init__(self, driver: DatabaseDriver) -> None:
        self.driver = driver
        self.engine = driver.engine
        with self.reading() as connection:
            setting = read_setting(connection)
        self.bucket = None if setting is None else Bucket(setting, driver.outage_s)
        """The bucket for large contents. Setting it needs exclusive access, so it cannot change meanwhile."""
        # Functions that read contents get the bucket from their connection.
        driver.engine.update_execution_options(store_bucket=self.bucket)
        self.writer = Writer(driver)
        self.lease_writer = self.writer if self.bucket is None else Writer(driver, "-leases")
        """The writer that renews leases: not behind writes that wait for the bucket, if there is one."""

    def close(self) -> None:
        """Finish the queued writes, and close all connections."""
        self.writer.close()
        self.lease_writer.close()
        self.driver.close()

    @contextmanager
    def reading(self) -> Generator[Connection]:
        """Yield a connection for reading. Errors inside are raised as a StoreError that names the database."""
        with self.driver.errors(), self.driver.connect() as connection:
            yield connection

    def read_content(self, query: Select[Any]) -> bytes | None:
        """Return the blob whose id a query returns, or None if it returns no row or NULL."""
        with self.reading() as connection:
            blob: int | None = connection.execute(query).scalar()
            return None if blob is None else read_blobs(connection, [blob])[blob]


class Repository:
    """The reads and writes for one kind of record.

    Reads run synchronously in the caller's thread. Writes (methods with `@queued`) return a future, which resolves
    once the write is durable, or fails with a StoreError; do not change arguments before that.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._reading = database.reading

    def _read_all(self, query: Select[*tuple[Any, ...]], read: Callable[[RowMapping], T]) -> list[T]:
        """Return what `read` makes of each row of a query."""
        with self._reading() as connection:
            rows = connection.execute(query).mappings().all()
            return [read(row) for row in rows]

    @property
    def _name(self) -> str:
        """The name of the store in error messages."""
        return self._database.driver.name


def queued(write: Callable[Concatenate[R, WriteContext, P], T]) -> Callable[Concatenate[R, P], Future[T]]:
    """Make a repository's method a queued write: callers omit the context, and get a future of the result.

    The method runs in the writer's thread, inside its transaction. It may run twice: if another write of the same
    group fails, every write is repeated by itself.
    """

    @functools.wraps(write)
    def submit(self: R, /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        writer = self._database.writer  # pyright: ignore[reportPrivateUsage]
        return writer.submit(lambda context: write(self, context, *args, **kwargs))

    return submit
