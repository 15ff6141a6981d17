"""The store in PostgreSQL, as no directory is: addresses, servers that refuse, that die, texts of any kind."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from hypothesis import given
from hypothesis import strategies as st

from understudy.errors import ConfigError, StoreError
from understudy.store import Store
from understudy.store.address import StoreUrl, parse_location
from understudy.store.database import WriteContext
from understudy.store.escaping import escape_text, unescape_text
from understudy.store.postgresql_arrays import array_of, register_arrays
from understudy.store.runs import Lease
from understudy.store.schema import HEAD, metadata
from understudy.store.statements import ElementKind
from understudy.types import Call

from support.postgresql import PASSWORD, LosingProxy, PostgresqlServer
from support.store import make_call, prepare, running, writes_held

services = pytest.mark.services


# --- addresses and texts -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("postgresql://u:geheim@h:5433/db", "postgresql://u@h:5433/db"),
        ("postgres://u@h/db", "postgresql://u@h/db"),
        ("postgresql:///db?host=/run/x&password=geheim", "postgresql:///db?host=/run/x"),
        ("postgresql://u@/db?sslpassword=geheim&port=1", "postgresql://u@/db?port=1"),
        ("postgresql://u:ge%68eim@h", "postgresql://u@h"),
        ("postgresql://h?user=me&password=geheim&dbname=runs", "postgresql://h?user=me&dbname=runs"),
        ("postgresql://u:ge/heim@h/db", "postgresql://u@h/db"),
        ("postgresql:///db?PASSWORD=geheim", "postgresql:///db"),
        ("postgresql:///db?p%61ssword=geheim&port=1", "postgresql:///db?port=1"),
    ],
)
def test_an_address_is_shown_without_its_password(url: str, expected: str) -> None:
    location = parse_location(url)
    assert isinstance(location, StoreUrl)
    assert (str(location), repr(location)) == (expected, f"StoreUrl('{expected}')")
    assert location.secret_url == url
    assert "geheim" not in location.without_passwords(f"could not use {url}")
    assert location == parse_location(url) != parse_location("postgresql://other")


def test_a_short_password_does_not_change_other_words() -> None:
    location = parse_location("postgresql://u:e@host/runs")
    assert isinstance(location, StoreUrl)
    clean = location.without_passwords
    assert clean("the server refused the connection") == "the server refused the connection"
    assert clean('invalid port number: "e"') == 'invalid port number: "***"'
    assert clean("postgresql://u:e@host/runs failed") == "postgresql://u@host/runs failed"
    assert clean("postgresql://other:e@host") == "postgresql://other:***@host"


def test_other_addresses_are_directories_or_refused() -> None:
    assert parse_location("runs/one") == parse_location(Path("runs/one")) == Path("runs/one")
    with pytest.raises(ConfigError, match=r"mysql:// is not a supported kind of store.*postgresql://"):
        parse_location("mysql://h/db")


@given(st.text(alphabet=st.characters() | st.sampled_from("\0\ud800\udfff\U0010ffff")))
def test_every_text_is_escaped_and_read_again(text: str) -> None:
    is_unicode = all(not 0xD800 <= ord(each) <= 0xDFFF for each in text)
    stored = text if is_unicode else text.encode(errors="surrogatepass")
    escaped = escape_text(stored)
    assert "\0" not in escaped and escaped.encode().decode() == escaped
    assert unescape_text(escaped) == stored


# --- opening -------------------------------------------------------------------------------------------


def rows(url: StoreUrl, query: str) -> list[tuple[Any, ...]]:
    """What a statement of an administrator returns."""
    import psycopg

    with psycopg.connect(url.secret_url, autocommit=True) as connection:
        cursor = connection.execute(query.encode())
        return cursor.fetchall() if cursor.description else []


@services
def test_a_store_of_the_release_before_is_brought_up_to_the_same_tables(postgresql_store: StoreUrl) -> None:
    columns = (
        "SELECT table_name, column_name, data_type, collation_name, is_nullable, column_default "
        "FROM information_schema.columns WHERE table_schema = 'public' ORDER BY 1, 2"
    )
    before = rows(postgresql_store, columns)
    for change in (
        "DROP TABLE workers",
        "ALTER TABLE store_writers RENAME committed_at TO opened_at",
        "ALTER TABLE traces DROP tools_source, DROP tools_bytes, DROP tools_escaped",
        "ALTER TABLE turns DROP prompt_bytes, DROP prompt_escaped, DROP prompt_messages, DROP prompt_images",
        "ALTER TABLE turns DROP answer_chars",
        "DROP TABLE settings",
        "ALTER TABLE blobs DROP bucket_bytes",
        "UPDATE alembic_version SET version_num = '0007'",
    ):
        rows(postgresql_store, change)
    with Store.open(postgresql_store) as store:
        prepare(store)
    assert rows(postgresql_store, columns) == before


@services
def test_the_notes_of_writers_that_ended_are_removed_after_a_day_and_who_lives_makes_its_own_anew(
    postgresql_store: StoreUrl,
) -> None:
    with Store.open(postgresql_store) as living:
        prepare(living)
        rows(postgresql_store, "UPDATE store_writers SET committed_at = 0")
        rows(postgresql_store, "INSERT INTO store_writers VALUES ('dead', 7, 0)")
        with Store.open(postgresql_store) as other:
            prepare(other, run="other")
        assert len(rows(postgresql_store, "SELECT id FROM store_writers")) == 1
        prepare(living, run="again")
        assert len(rows(postgresql_store, "SELECT id FROM store_writers WHERE id <> 'dead'")) == 2


@services
def test_a_new_database_has_exactly_the_schema(postgresql_url: StoreUrl) -> None:
    with pytest.raises(StoreError, match="has no store"):
        Store.open(postgresql_url, create=False)
    with Store.open(postgresql_url) as store, store._database.reading() as connection:
        context = MigrationContext.configure(connection)
        differences = [each for each in compare_metadata(context, metadata) if "store_writers" not in str(each)]
        # What SQLite numbers by itself is a column here.
        assert sorted(each[0] for each in differences) == ["remove_column", "remove_constraint"], differences
        assert all("rowid" in str(each) for each in differences)
        assert connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar() == HEAD
        assert connection.exec_driver_sql("SHOW synchronous_commit").scalar() == "on"


@services
def test_several_processes_open_a_new_database_at_the_same_time(postgresql_url: StoreUrl) -> None:
    results: list[Future[None]] = []

    def open_store(future: Future[None]) -> None:
        try:
            Store.open(postgresql_url).close()
            future.set_result(None)
        except StoreError as error:
            future.set_exception(error)

    for _ in range(4):
        results.append(Future())
        threading.Thread(target=open_store, args=(results[-1],)).start()
    for future in results:
        future.result(60)


@services
def test_what_cannot_be_opened_says_why_and_never_the_password(
    postgresql_server: PostgresqlServer, postgresql_store: StoreUrl, postgresql_url: StoreUrl
) -> None:
    right, wrong = postgresql_store.secret_url, "quite-wrong-1"
    host = str(postgresql_server.directory)
    cases = {
        right.replace(PASSWORD, wrong): r"refused the user.*PGPASSWORD",
        postgresql_server.url("absent"): r"no such database|not there",
        right.replace(host, "/nowhere"): r"cannot be reached",
        right.replace("?host", "?nonsense=1&host"): r"nonsense",
        f"postgresql://u:{wrong}@127.0.0.1:1/x": r"cannot be reached",
    }
    for url, message in cases.items():
        with pytest.raises(StoreError, match=message) as raised:
            Store.open(StoreUrl(url), create=False)
        texts = [str(raised.value), repr(raised.value)]
        assert not any(secret in text for text in texts for secret in (PASSWORD, wrong)), texts
    postgresql_server.execute("CREATE TABLE bookmarks (url text)", database_of(postgresql_url))
    with pytest.raises(StoreError, match=r"tables of another application .bookmarks.*separate database"):
        Store.open(postgresql_url)
    postgresql_server.execute("UPDATE alembic_version SET version_num = '9999'", database_of(postgresql_store))
    for read_only in (False, True):
        with pytest.raises(StoreError, match=r"newer release.*9999.*update understudy"):
            Store.open(postgresql_store, read_only=read_only)


def database_of(url: StoreUrl) -> str:
    return url.secret_url.rpartition("@/")[2].partition("?")[0]


@services
def test_a_store_in_a_database_has_no_directory(postgresql_store: StoreUrl) -> None:
    with Store.open(postgresql_store) as store, pytest.raises(StoreError, match=r"is a database.*store copy"):
        _ = store.directory


# --- a server that dies --------------------------------------------------------------------------------


@services
def test_writes_wait_for_a_server_that_is_killed_and_none_is_lost_or_doubled(
    postgresql_server: PostgresqlServer, postgresql_store: StoreUrl
) -> None:
    with Store.open(postgresql_store) as store:
        prepare(store, 4)
        attempts = [running(store, f"run-{n}").id for n in range(4)]
        answered: dict[str, list[Call]] = {attempt: [] for attempt in attempts}
        stop = threading.Event()
        failures: list[StoreError] = []

        def work(attempt: str) -> None:
            n = 0
            while not stop.is_set():
                call = make_call(attempt, n, request=b'{"messages": ["' + b"%d" % n * 200 + b'"]}')
                try:
                    store.calls.append(call).result()
                except StoreError as error:
                    failures.append(error)
                    return
                answered[attempt].append(call)
                n += 1

        threads = [threading.Thread(target=work, args=(attempt,)) for attempt in attempts]
        for thread in threads:
            thread.start()
        for _ in range(3):
            before = sum(map(len, answered.values()))
            while sum(map(len, answered.values())) < before + 20 and not failures:
                time.sleep(0.01)
            postgresql_server.stop(signal.SIGKILL)
            postgresql_server.start()
        stop.set()
        for thread in threads:
            thread.join()
        assert failures == []
        for attempt, calls in answered.items():
            assert list(store.calls.of_attempt(attempt)) == calls
        # A status moved while its connection was lost is moved once.
        assert store.runs.attempts("run-0")[0].status == "running"


@services
def test_a_group_whose_commit_nobody_saw_is_not_written_twice(
    postgresql_server: PostgresqlServer, postgresql_store: StoreUrl, tmp_path: Path
) -> None:
    """The connection is lost before the answer to a commit: what can be done once is neither lost nor refused."""
    with LosingProxy(postgresql_server) as proxy:
        url = postgresql_store.secret_url.replace(str(postgresql_server.directory), str(proxy.directory))
        with Store.open(StoreUrl(url)) as store:
            prepare(store, 2)
            proxy.lose_next_commit()
            attempt = store.runs.start_attempt("run-0").result(60)
            assert proxy.lost == 1 and attempt.number == 1
            assert len(store.runs.attempts("run-0")) == 1
            store.runs.mark_running(attempt.id).result(60)
            with pytest.raises(StoreError, match="cannot become preparing: it is running"):
                store.runs.start_attempt("run-0").result(60)


@services
def test_who_stores_the_same_as_a_writer_that_vanished_in_a_transaction_waits_and_fails_not(
    postgresql_store: StoreUrl,
) -> None:
    stored, waits, is_over = threading.Event(), threading.Event(), threading.Event()

    def vanish(context: WriteContext) -> bool:
        stored.set()
        assert waits.wait(60)
        context.connection.exec_driver_sql("SELECT 1")  # the other one began to wait before
        return is_over.wait(90)

    with Store.open(postgresql_store) as vanishing, Store.open(postgresql_store) as other:
        prepare(vanishing, 2)
        calls = [
            make_call(running(vanishing, f"run-{n}").id, request=b'{"messages": ["the same"]}') for n in range(2)
        ]
        with writes_held(vanishing):
            first = vanishing.calls.append(calls[0])
            vanishing._database.writer.submit(vanish)  # pyright: ignore[reportPrivateUsage]
        assert stored.wait(60)
        second = other.calls.append(calls[1])
        with psycopg.connect(postgresql_store.secret_url, autocommit=True) as database:
            while not database.execute("SELECT 1 FROM pg_locks WHERE NOT granted").fetchone():
                time.sleep(0.05)
        time.sleep(1.0)
        waits.set()
        second.result(80)
        is_over.set()
        first.result(60)
        for call in calls:
            assert list(other.calls.of_attempt(call.attempt_id)) == [call]


@services
def test_after_an_outage_for_all_nobody_loses_what_it_holds(
    postgresql_server: PostgresqlServer, postgresql_store: StoreUrl
) -> None:
    lease = Lease("a", 4.0)
    with (
        LosingProxy(postgresql_server) as one,
        LosingProxy(postgresql_server) as two,
        Store.open(one.url(postgresql_store)) as holder,
        Store.open(two.url(postgresql_store)) as other,
    ):
        prepare(holder)
        holder.leases.open_to_workers("run", "1.0").result()
        (claimed,) = holder.leases.claim(lease, ["run"], 1).result()
        assert other.leases.requeue_expired(lease.seconds).result() == 0
        for proxy in (one, two):
            proxy.freeze()
        asked = other.leases.requeue_expired(lease.seconds)
        time.sleep(lease.seconds + 1.0)
        two.thaw()
        assert asked.result(60) == 0
        one.thaw()
        assert holder.leases.renew(lease, [claimed.attempt.id]).result(60) == {claimed.attempt.id}
        # But who does not come back loses it.
        end = time.monotonic() + 60
        while other.leases.requeue_expired(lease.seconds).result() == 0:
            assert time.monotonic() < end
            time.sleep(0.5)
        assert holder.leases.renew(lease, [claimed.attempt.id]).result(60) == frozenset()


COUNT_INSERTS = """
    CREATE TABLE statements (number INT);
    CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql
    AS $$ BEGIN INSERT INTO statements VALUES (1); RETURN NULL; END $$;
    CREATE TRIGGER note AFTER INSERT ON calls FOR EACH STATEMENT EXECUTE FUNCTION note()
"""


@services
def test_calls_that_are_committed_together_are_inserted_by_one_statement(postgresql_store: StoreUrl) -> None:
    with Store.open(postgresql_store) as store, psycopg.connect(postgresql_store.secret_url) as database:
        prepare(store, 3)
        calls = [
            make_call(running(store, f"run-{n}").id, n, session_id="\x00" if n else None, cost_usd=0.1 * n or None)
            for n in range(3)
        ]
        database.execute(COUNT_INSERTS.encode())
        database.commit()
        with writes_held(store):
            stored = [store.calls.append(call) for call in calls]
        for future, call in zip(stored, calls, strict=True):
            assert future.result() is None
            assert list(store.calls.of_attempt(call.attempt_id)) == [call]
        assert database.execute("SELECT count(*) FROM statements").fetchone() == (1,)


INTEGERS = st.none() | st.integers(-(2**63), 2**63 - 1)


@services
@given(
    st.lists(INTEGERS),
    st.lists(st.none() | st.floats(allow_nan=False)),
    st.lists(st.none() | st.binary(max_size=50)),
    st.lists(st.none() | st.text(max_size=20)),
)
def test_columns_are_read_as_they_were_sent(
    postgresql_server: PostgresqlServer,
    integers: list[int | None],
    numbers: list[float | None],
    contents: list[bytes | None],
    texts: list[str | None],
) -> None:
    columns: dict[ElementKind, list[Any]] = {
        "bigint": integers, "float": numbers, "bytea": contents, "text": texts,
    }  # fmt: skip
    with psycopg.connect(postgresql_server.url("postgres")) as database:
        register_arrays(database)
        for kind, values in columns.items():
            query = f"SELECT unnest($1::{kind}[])".encode()
            rows = psycopg.RawCursor(database).execute(query, [array_of(kind, values)], binary=True).fetchall()
            plain = [unescape_text(row[0]) if kind == "text" and row[0] is not None else row[0] for row in rows]
            assert plain == values
