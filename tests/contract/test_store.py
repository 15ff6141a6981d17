"""The store's contract, on a real store: what goes in comes out, once, and what is illegal is refused."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, create_engine, func, select

from understudy.errors import NotInStore, StoreError
from understudy.ingest.trace_store import store_trace, traces
from understudy.store import Store, sqlite
from understudy.store.address import StoreLocation, StoreUrl
from understudy.store.migrate import migrate_connection
from understudy.store.schema import blobs, metadata
from understudy.store.sqlite import open_engine
from understudy.types import (
    ATTEMPT_TRANSITIONS,
    ROLLOUT_TRANSITIONS,
    AgentIdentity,
    Attempt,
    AttemptStatus,
    Call,
    ErrorInfo,
    Finding,
    PolicySpan,
    RolloutStatus,
    Usage,
    Verdict,
)

from support import example_count
from support.claude_log import Log, read
from support.store import make_call, make_task, prepare, running, writes_held


@pytest.fixture
def store(location: StoreLocation) -> Iterator[Store]:
    with Store.open(location) as store_of_test:
        prepare(store_of_test)
        yield store_of_test


@pytest.fixture
def file_store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "s") as store_of_test:
        prepare(store_of_test)
        yield store_of_test


# --- opening -------------------------------------------------------------------------------------------


def test_a_new_store_is_what_all_migrations_make(tmp_path: Path) -> None:
    made = [open_engine(tmp_path / "new", create=True), create_engine(f"sqlite:///{tmp_path / 'migrated.db'}")]
    with made[1].begin() as connection:
        migrate_connection(connection)
    new, migrated = (_schema(engine) for engine in made)
    assert new == migrated
    assert len(new) > 10


def _schema(engine: Engine) -> dict[str, tuple[str, list[str]]]:
    """What a database is made of: the head of each table's or index's statement, and its parts in any order."""
    with engine.connect() as connection:
        rows = connection.exec_driver_sql("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL").all()
        version = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar_one()
    engine.dispose()
    parts: dict[str, tuple[str, list[str]]] = {"": (version, [])}
    for name, sql in rows:
        head, _, body = " ".join(sql.replace('"', "").split()).partition("(")
        body = re.sub(
            r"\([^()]*\)",
            lambda inner: inner[0].replace(", ", ",").replace(" ", ""),
            body.strip().removesuffix(")"),
        )
        parts[name] = (head.strip(), sorted(part.strip() for part in body.split(", ")))
    return parts


def test_a_new_store_has_exactly_the_schema(tmp_path: Path) -> None:
    engine = open_engine(tmp_path, create=True)
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
        made = set(connection.exec_driver_sql("SELECT name FROM sqlite_master WHERE sql IS NOT NULL").scalars())
        pragma = connection.exec_driver_sql
        assert pragma("PRAGMA journal_mode").scalar() == "wal"
        assert pragma("PRAGMA synchronous").scalar() == 2
        assert pragma("PRAGMA foreign_keys").scalar() == 1
    engine.dispose()
    indexes = {index.name for table in metadata.tables.values() for index in table.indexes}
    assert made == {*metadata.tables, *indexes, "alembic_version"}


def test_a_store_of_the_first_release_is_brought_up_with_all_it_holds(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "store.db") as raw:
        raw.executescript((Path(__file__).parents[1] / "data" / "store_0001.sql").read_text())
        raw.execute("UPDATE runs SET config = ?", (b'{"backend": "embedded"}',))
        raw.execute("UPDATE calls SET backend = 'openai'")
    raw.close()
    with Store.open(tmp_path) as store:
        done, open_ = store.runs.attempts("run-0")[0], store.runs.attempts("run-1")[0]
        first, second = store.calls.of_attempt(done.id)
        assert (first.prompt_token_ids, second.prompt_token_ids) == ((1, 2, 3), (1, 2, 3, 4, 5, 6))
        assert (first.usage, first.policy_version, first.logprobs) == (Usage(3, 1, 2), "v1", (-0.5,))
        assert (first.backend, second.backend) == ("embedded", "embedded")
        assert (first.cost_usd, first.policy_spans, first.audit) == (None, (), {})
        assert len(json.loads(second.request)["messages"]) == 3
        assert (done.findings, done.timings, store.runs.logs(done.id)) == (
            (),
            {"agent_s": 1.5},
            {"out": b"log"},
        )
        assert (store.runs.patch(done.id), store.runs.rollout("run-0").status) == (b"diff", "succeeded")
        store.calls.append(make_call(open_.id, 1, cost_usd=0.5)).result()
        assert store.runs.recover("run").result() == 1
        client = store.keys.add_client("x").result()
        store.calls.append(make_call(client.id)).result()
    engine = open_engine(tmp_path, create=False)
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
        assert connection.exec_driver_sql("PRAGMA foreign_key_check").all() == []
        assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1
    engine.dispose()


@pytest.mark.parametrize("schema", ["0001", "0002", "0003", "0004"])
def test_the_rollouts_of_older_stores_keep_their_ids_and_get_the_agent_that_worked(
    tmp_path: Path, schema: str
) -> None:
    with sqlite3.connect(tmp_path / "store.db") as raw:
        raw.executescript((Path(__file__).parents[1] / "data" / f"store_{schema}.sql").read_text())
        before = raw.execute(
            "SELECT id, run_id, task_id, sample_index, status FROM rollouts ORDER BY id"
        ).fetchall()
    raw.close()
    with Store.open(tmp_path) as store:
        after = sorted(store.runs.rollouts(), key=lambda each: each.id)
        assert [(r.id, r.run_id, r.task_id, r.sample_index, r.status) for r in after] == before
        agents = {rollout.id: rollout.agent for rollout in after}
        assert agents["run-0"] == AgentIdentity("claude-code", "2.1.100" if schema == "0004" else None)
        assert agents["run-1"] == AgentIdentity("claude-code")
        if schema == "0004":
            assert agents["shell-0"] == agents["shell-1"] == AgentIdentity("shell")
        assert store.training.steps() == []
        # What waited goes on with the agent of today.
        queued = msgspec.structs.replace(after[1], status="queuing")
        if after[1] == queued:
            newer = AgentIdentity("claude-code", "2.1.197")
            store.runs.create_rollouts("run", [(r.id, "t", r.sample_index) for r in after[:2]], newer).result()
            assert store.runs.rollout("run-1").agent == newer
            assert store.runs.rollout("run-0").agent == agents["run-0"]
    engine = open_engine(tmp_path, create=False)
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
        assert connection.exec_driver_sql("PRAGMA foreign_key_check").all() == []
    engine.dispose()


def test_a_store_that_cannot_be_brought_up_is_left_as_it_was(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "store.db") as raw:
        raw.executescript((Path(__file__).parents[1] / "data" / "store_0001.sql").read_text())
        raw.execute(
            "INSERT INTO attempts SELECT 'lost', 'no', 1, '', 0, 0, 0, error, timings, NULL FROM attempts LIMIT 1"
        )
    raw.close()
    for _ in range(2):
        with pytest.raises(StoreError, match="damaged"):
            Store.open(tmp_path)
    with sqlite3.connect(tmp_path / "store.db") as raw:
        assert raw.execute("SELECT version_num FROM alembic_version").fetchone() == ("0001",)
        assert raw.execute("SELECT COUNT(*) FROM attempts").fetchone() == (3,)
    raw.close()


def test_a_closed_store_is_one_file_that_can_be_copied(tmp_path: Path) -> None:
    with Store.open(tmp_path / "a") as store:
        prepare(store)
        attempt = running(store)
        store.calls.append(make_call(attempt.id))  # not awaited: close drains
    assert [file.name for file in (tmp_path / "a").iterdir()] == ["store.db"]
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with Store.open(tmp_path / "b", create=False) as copy:
        assert list(copy.calls.of_attempt(attempt.id)) == [make_call(attempt.id)]


def test_opening_an_existing_store_does_not_import_alembic(file_store: Store) -> None:
    code = (
        "import sys; from pathlib import Path; from understudy.store import Store\n"
        "Store.open(Path(sys.argv[1])).close(); assert 'alembic' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(file_store.directory)], check=True, timeout=60)


def test_no_store_where_one_must_be(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="has no store"):
        Store.open(tmp_path, create=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot contain a store"):
        Store.open(tmp_path / "file")


def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    content = b"this is no database at all, only text. " * 200
    (tmp_path / "store.db").write_bytes(content)
    with pytest.raises(StoreError, match=r"store\.db.*not an SQLite file"):
        Store.open(tmp_path)
    assert (tmp_path / "store.db").read_bytes() == content


@pytest.mark.parametrize("create", [False, True])
def test_an_empty_file_is_no_empty_store(tmp_path: Path, create: bool) -> None:
    (tmp_path / "store.db").touch()
    with pytest.raises(StoreError, match=r"store\.db is empty \(0 bytes\).*restore it"):
        Store.open(tmp_path, create=create)
    assert (tmp_path / "store.db").stat().st_size == 0


def test_a_new_store_appears_with_content_and_alone(tmp_path: Path) -> None:
    sqlite._make_database(tmp_path / "store.db")  # pyright: ignore[reportPrivateUsage]
    assert [path.name for path in tmp_path.iterdir()] == ["store.db"]
    first = (tmp_path / "store.db").read_bytes()
    assert first
    with Store.open(tmp_path) as store:  # as after a kill before the tables were made
        assert store.runs.rollouts() == []


def test_another_programs_database_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "store.db") as other:
        other.execute("CREATE TABLE bookmarks (url)")
    other.close()
    with pytest.raises(StoreError, match="not a store"):
        Store.open(tmp_path)


def test_a_newer_schema_is_refused(file_store: Store) -> None:
    file_store.close()
    with sqlite3.connect(file_store.directory / "store.db") as raw:
        raw.execute("UPDATE alembic_version SET version_num = '9999'")
    raw.close()
    with pytest.raises(StoreError, match=r"newer release.*9999.*update understudy"):
        Store.open(file_store.directory)


def test_damage_is_told_as_damage(file_store: Store) -> None:
    attempt = running(file_store)
    body = json.dumps({"messages": ["the quick brown fox" * 200] * 3}).encode()
    file_store.calls.append(make_call(attempt.id, request=body)).result()
    file_store.close()
    with sqlite3.connect(file_store.directory / "store.db") as raw:
        raw.execute("UPDATE blobs SET data = x'00' WHERE codec = 1")
    raw.close()
    with Store.open(file_store.directory) as again, pytest.raises(StoreError, match=r"store\.db: .*damaged"):
        list(again.calls.of_attempt(attempt.id))


def test_damage_that_is_found_while_a_call_is_assembled_names_the_store(file_store: Store) -> None:
    attempt = running(file_store)
    file_store.calls.append(make_call(attempt.id)).result()
    file_store.close()
    with sqlite3.connect(file_store.directory / "store.db") as raw:
        raw.execute("UPDATE blobs SET data = x'00', codec = 0 WHERE id IN (SELECT skeleton_id FROM calls)")
    raw.close()
    with Store.open(file_store.directory) as again, pytest.raises(StoreError, match=r"store\.db: .*a request"):
        list(again.calls.of_attempt(attempt.id))


def test_a_torn_file_is_told_as_damage(file_store: Store) -> None:
    file_store.close()
    file = file_store.directory / "store.db"
    data = bytearray(file.read_bytes())
    data[4096:] = b"\xa5" * (len(data) - 4096)
    file.write_bytes(data)
    with pytest.raises(StoreError, match="damaged"), Store.open(file_store.directory) as again:
        again.runs.rollouts()


def test_a_missing_table_is_told_as_damage(file_store: Store) -> None:
    file_store.close()
    with sqlite3.connect(file_store.directory / "store.db") as raw:
        raw.execute("DROP TABLE rewards")
    raw.close()
    named = pytest.raises(StoreError, match=r"store\.db: the store is damaged: .*rewards")
    with named, Store.open(file_store.directory, create=False) as again:
        again.outcomes.decisions()


def test_a_closed_store_takes_no_more(store: Store) -> None:
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.runs.create("other", {})


# --- idempotency ---------------------------------------------------------------------------------------


def test_the_same_again_is_fine_and_something_else_is_not(store: Store) -> None:
    prepare(store)
    assert [run.config for run in store.runs.all()] == [{"model": "m"}]
    assert [rollout.id for rollout in store.runs.rollouts("run")] == ["run-0"]
    assert store.runs.task("run", "t") == make_task()
    for future, message in (
        (store.runs.create("run", {"model": "n"}), "another configuration.*model"),
        (store.runs.add_tasks("run", [make_task(instruction="other")]), "different content"),
        (store.runs.create_rollouts("run", [("run-0", "t", 1)]), "collides"),
        (store.runs.create_rollouts("run", [("other", "t", 0)]), "collides"),
        (store.runs.create_rollouts("run", [("other", "no-such-task", 0)]), "not in the store"),
        (store.runs.create("bad", {"when": object()}), "JSON"),
    ):
        with pytest.raises(StoreError, match=message):
            future.result()
    assert len(store.runs.rollouts()) == 1


def test_a_call_is_stored_once(store: Store) -> None:
    attempt = running(store)
    call = make_call(attempt.id)
    for _ in range(3):
        store.calls.append(call).result()
    with pytest.raises(StoreError, match="duplicate call id"):
        store.calls.append(msgspec.structs.replace(call, sequence=7)).result()
    with pytest.raises(StoreError, match=f"attempt {attempt.id} has another call with number 0"):
        store.calls.append(msgspec.structs.replace(call, id="other")).result()
    assert list(store.calls.of_attempt(attempt.id)) == [call]


def test_calls_that_are_committed_together_are_stored_as_each_alone(store: Store) -> None:
    prepare(store, rollouts=2)
    attempts = [running(store, f"run-{number}").id for number in range(2)]
    stored: dict[str, list[Call]] = {attempt: [] for attempt in attempts}
    for group in ((0, 1, 2), (3,), (4, 5)):
        with writes_held(store):
            for attempt in attempts:
                for n in group:
                    # The first and every third message are equal, also within one conversation.
                    messages = [{"role": "user", "content": f"{number % 3}" * 300} for number in range(2 * n + 1)]
                    body = {"system": "s" * 500, "tools": [attempt], "messages": messages}
                    prompt = tuple(range(10 * n + 3))
                    call = make_call(
                        attempt,
                        n,
                        request=json.dumps(body).encode(),
                        response=b"r" * 500,
                        parent_id=f"{attempt}-{n - 1}" if n else None,
                        prompt_token_ids=prompt if n != 3 else None,
                        completion_token_ids=(n, n),
                    )
                    stored[attempt].append(call)
                    done = [store.calls.append(call), store.calls.append(call)]
            strange = store.calls.append(make_call("no-such-attempt", 0)) if group == (3,) else None
        for future in done:
            future.result()
        if strange is not None:
            with pytest.raises(StoreError):
                strange.result()
        for attempt in attempts:
            assert list(store.calls.of_attempt(attempt)) == stored[attempt]
    with store._database.reading() as connection:
        assert connection.execute(select(func.count()).select_from(blobs)).scalar_one() <= 12


def test_of_two_calls_with_one_id_that_are_committed_together_the_first_is_stored(store: Store) -> None:
    attempt = running(store)
    first, second = (make_call(attempt.id, request=json.dumps({"messages": [text]}).encode()) for text in "ab")
    with writes_held(store):
        done = [store.calls.append(call) for call in (first, second)]
    assert [future.result() for future in done] == [None, None]
    assert list(store.calls.of_attempt(attempt.id)) == [first]


def test_contents_are_stored_once(store: Store) -> None:
    attempt = running(store)
    body = {"system": "s" * 500, "tools": ["t" * 500], "messages": ["m" * 500]}
    for n in range(10):
        call = make_call(attempt.id, n, request=json.dumps(body).encode(), response=b"r" * 500)
        store.calls.append(call).result()
    with store._database.reading() as connection:
        # The task, then skeleton, system, tools, the message and the response.
        assert connection.exec_driver_sql("SELECT COUNT(*) FROM blobs").scalar() == 6
        assert connection.exec_driver_sql("SELECT COUNT(*) FROM nodes").scalar() == 1


def test_a_sample_of_a_task_is_another_rollout_with_another_agent(store: Store) -> None:
    shell, newer = AgentIdentity("shell"), AgentIdentity("claude-code", "3.0")
    store.runs.create_rollouts("run", [("shell", "t", 0)], shell).result()
    attempt = running(store)
    store.runs.create_rollouts("run", [("run-0", "t", 0)], newer).result()
    assert store.runs.rollout("run-0").agent == AgentIdentity("claude-code"), "an attempt is under way"
    store.runs.finish_attempt(attempt.id, "failed", "requeuing").result()
    store.runs.create_rollouts("run", [("run-0", "t", 0)], newer).result()
    agents = {rollout.id: rollout.agent for rollout in store.runs.rollouts()}
    assert agents == {"run-0": newer, "shell": shell}
    with pytest.raises(StoreError, match="collides"):
        store.runs.create_rollouts("run", [("other", "t", 0)], shell).result()
    with pytest.raises(StoreError, match="collides"):
        store.runs.create_rollouts("run", [("run-0", "t", 0)], shell).result()


# --- lives ---------------------------------------------------------------------------------------------

ROLLOUT_PAIRS = [(a, b) for a in get_args(RolloutStatus) for b in get_args(RolloutStatus)]
ATTEMPT_PAIRS = [(a, b) for a in get_args(AttemptStatus) for b in get_args(AttemptStatus) if b != "preparing"]


def path_to(transitions: Any, start: str, end: str) -> list[str]:
    """A shortest legal way from one status to another."""
    ways = [[start]]
    for way in ways:
        if way[-1] == end:
            return way[1:]
        ways += [[*way, after] for after in sorted(transitions[way[-1]]) if after not in way]
    raise AssertionError(f"{end} cannot be reached")


def test_every_change_of_a_rollout_is_legal_or_refused(location: StoreLocation) -> None:
    with Store.open(location) as store:
        prepare(store, len(ROLLOUT_PAIRS))
        for n, (before, after) in enumerate(ROLLOUT_PAIRS):
            for step in path_to(ROLLOUT_TRANSITIONS, "queuing", before):
                store.runs.set_rollout_status(f"run-{n}", step).result()  # type: ignore[arg-type]
            moved = store.runs.set_rollout_status(f"run-{n}", after)
            if after in ROLLOUT_TRANSITIONS[before]:
                moved.result()
                assert store.runs.rollout(f"run-{n}").status == after
            else:
                with pytest.raises(StoreError, match=f"run-{n} cannot become {after}: it is {before}"):
                    moved.result()
                assert store.runs.rollout(f"run-{n}").status == before


def test_every_change_of_an_attempt_is_legal_or_refused(location: StoreLocation) -> None:
    with Store.open(location) as store:
        prepare(store, len(ATTEMPT_PAIRS))
        for n, (before, after) in enumerate(ATTEMPT_PAIRS):
            attempt = store.runs.start_attempt(f"run-{n}").result()

            def move(status: Any, attempt: Attempt = attempt) -> Future[None]:
                if status == "running":
                    return store.runs.mark_running(attempt.id)
                return store.runs.finish_attempt(attempt.id, status, "requeuing")

            for step in path_to(ATTEMPT_TRANSITIONS, "preparing", before):
                move(step).result()
            if after in ATTEMPT_TRANSITIONS[before]:
                move(after).result()
                assert store.runs.attempts(f"run-{n}")[0].status == after
            else:
                with pytest.raises(StoreError, match=f"cannot become {after}: it is {before}"):
                    move(after).result()
                assert store.runs.attempts(f"run-{n}")[0].status == before


def test_an_attempt_ends_with_all_that_came_of_it_or_not_at_all(store: Store) -> None:
    attempt = running(store)
    verdict = Verdict(reward=1.0, reason="1 of 1", tests={"a": "passed"}, log="ok")
    more: Any = {"patch": b"\x00diff", "verdict": verdict, "logs": {"out": b"x" * 999, "err": b""}}
    with pytest.raises(StoreError, match="cannot become queuing"):
        store.runs.finish_attempt(attempt.id, "succeeded", "queuing", **more).result()
    with pytest.raises(StoreError, match="reward"):
        bad = msgspec.structs.replace(verdict, reward=float("nan"))
        store.runs.finish_attempt(attempt.id, "succeeded", "succeeded", verdict=bad).result()
    assert store.runs.attempts("run-0")[0].status == "running"
    assert (
        store.runs.patch(attempt.id),
        store.runs.verdict(attempt.id),
        store.runs.logs(attempt.id),
    ) == (None, None, {})

    store.runs.finish_attempt(attempt.id, "succeeded", "succeeded", timings={"agent": 1.5}, **more).result()
    assert (store.runs.patch(attempt.id), store.runs.verdict(attempt.id)) == (b"\x00diff", verdict)
    assert store.runs.logs(attempt.id) == {"out": b"x" * 999, "err": b""}
    ended = store.runs.attempts("run-0")[0]
    assert (ended.status, ended.timings) == ("succeeded", {"agent": 1.5})
    assert ended.ended_at is not None and ended.ended_at >= ended.started_at
    assert store.runs.rollout("run-0").status == "succeeded"


def test_a_failure_is_kept_whatever_its_message_holds(store: Store) -> None:
    attempt = running(store)
    error = ErrorInfo("agent", "AgentError", "no such file: caf\udce9")
    store.runs.finish_attempt(attempt.id, "failed", "failed", error=error).result()
    assert store.runs.attempts("run-0")[0].error == ErrorInfo("agent", "AgentError", "no such file: caf?")


def test_the_findings_of_an_attempt_are_kept_with_its_end(store: Store) -> None:
    attempt = running(store)
    findings = [Finding(kind="budget", message=f"number {n}", call_id=f"call_{n}") for n in range(3)]
    odd = Finding(kind="session-log", message="caf\udce9")
    store.runs.finish_attempt(attempt.id, "succeeded", "succeeded", findings=[*findings, odd]).result()
    stored = store.runs.attempt(attempt.id).findings
    assert stored == (*findings, Finding(kind="session-log", message="caf?"))
    assert store.runs.attempts("run-0")[0].findings == stored
    with pytest.raises(StoreError, match="no attempt nobody"):
        store.runs.attempt("nobody")


# --- clients and keys ----------------------------------------------------------------------------------


def test_a_client_is_an_attempt_without_a_rollout(store: Store) -> None:
    client = store.keys.add_client("codex at home").result()
    assert (client.rollout_id, client.number, client.status) == (None, 1, "running")
    assert store.keys.add_client("codex at home").result() == client == store.runs.attempt(client.id)
    other = store.keys.add_client("b").result()
    assert store.keys.clients() == [client, other]
    assert store.calls.next_sequence(client.id) == 0
    store.calls.append(make_call(client.id, 4, cost_usd=1.5)).result()
    assert store.calls.next_sequence(client.id) == 5
    assert store.runs.recover("run").result() == 0
    assert (store.outcomes.counts("run").calls, store.outcomes.counts("run").cost_usd) == (0, 0.0)
    assert [rollout.id for rollout in store.runs.rollouts()] == ["run-0"]
    for bad in ("", " x", "a\nb", "\x1b[1m", "x" * 201):
        with pytest.raises(StoreError, match="invalid client name"):
            store.keys.add_client(bad).result()


def test_a_key_is_kept_until_it_is_revoked_and_one_at_a_time(store: Store) -> None:
    client = store.keys.add_client("a").result()
    store.keys.add(b"one", client.id, sampling={"seed": 7}, budget={"calls": 3}, expires_at=9e9).result()
    key = store.keys.find(b"one")
    assert key is not None and store.keys.all() == [key]
    assert (key.attempt_id, key.sampling, key.budget) == (client.id, {"seed": 7}, {"calls": 3})
    assert (key.expires_at, key.revoked_at) == (9e9, None)
    with pytest.raises(StoreError, match="already has a valid key"):
        store.keys.add(b"two", client.id).result()
    assert store.keys.revoke(client.id).result() is True
    assert store.keys.revoke(client.id).result() is False
    revoked = store.keys.find(b"one")
    assert revoked is not None and revoked.revoked_at is not None
    store.keys.add(b"two", client.id, expires_at=1.0).result()
    store.keys.add(b"three", client.id).result()  # what expired is replaced as well
    stored = store.keys.all()
    assert [key.digest for key in stored] == [b"three"]
    assert store.keys.find(b"one") is None
    other = store.keys.add_client("other").result()
    with pytest.raises(StoreError, match="JSON"):
        store.keys.add(b"four", other.id, budget={"a": object()}).result()
    with pytest.raises(StoreError, match="not in the store"):
        store.keys.add(b"four", "nobody").result()


def test_after_a_kill_open_attempts_go_and_their_rollouts_come_again(location: StoreLocation) -> None:
    with Store.open(location) as store:
        prepare(store, 4)
        prepare(store, 1, run="other")
        done, works, other = running(store), running(store, "run-1"), running(store, "other-0")
        starts = store.runs.start_attempt("run-2").result()
        store.runs.finish_attempt(done.id, "succeeded", "succeeded").result()
        assert store.runs.recover("run").result() == 2
        assert store.runs.recover("run").result() == 0
        assert [r.status for r in store.runs.rollouts("run")] == [
            "succeeded",
            "requeuing",
            "requeuing",
            "queuing",
        ]
        assert store.runs.attempts("other-0")[0].status == "running"
        for attempt in (works, starts):
            lost = store.runs.attempts(attempt.rollout_id)[0]
            assert lost.status == "unresponsive" and lost.error is not None
        assert store.runs.start_attempt("run-1").result().number == 2
        store.runs.heartbeat([works.id, other.id]).result()
        assert store.runs.attempts("other-0")[0].heartbeat_at > other.heartbeat_at


def test_a_run_in_figures(location: StoreLocation) -> None:
    with Store.open(location) as store:
        prepare(store, 4)
        for n, reward in enumerate((1.0, 0.0, None)):
            attempt = running(store, f"run-{n}")
            usage = Usage(prompt_tokens=100, completion_tokens=10, cached_tokens=90)
            store.calls.append(make_call(attempt.id, usage=usage, cost_usd=0.25)).result()
            error = ErrorInfo("backend", "BackendError", "down")
            store.calls.append(make_call(attempt.id, 1, status="error", error=error)).result()
            verdict = None if reward is None else Verdict(reward=reward, reason="")
            store.runs.finish_attempt(attempt.id, "succeeded", "succeeded", verdict=verdict).result()
        counts = store.outcomes.counts("run")
        assert counts.rollouts == {"succeeded": 3, "queuing": 1}
        assert (counts.solved, counts.unsolved, counts.calls) == (1, 1, 6)
        assert (counts.prompt_tokens, counts.completion_tokens) == (300, 30)
        assert counts.cost_usd == 0.75
        assert store.outcomes.counts("nothing").calls == 0


def test_rollouts_are_found_by_a_unique_prefix(location: StoreLocation) -> None:
    with Store.open(location) as store:
        prepare(store, 11)
        assert store.runs.find_rollout("run-10").id == "run-10"
        assert store.runs.find_rollout("run-1").id == "run-1"
        assert store.runs.find_rollout("run-7").id == "run-7"
        for prefix, message in (
            ("run-", "type more"),
            ("", "type more"),
            ("RUN-7", "no rollout"),
            ("%", "no rollout"),
        ):
            with pytest.raises(StoreError, match=message):
                store.runs.find_rollout(prefix)
        for unknown in (
            lambda: store.runs.rollout("x"),
            lambda: store.calls.get("x"),
            lambda: store.runs.task("run", "x"),
        ):
            with pytest.raises(StoreError):
                unknown()


# --- calls ---------------------------------------------------------------------------------------------

token_ids = st.lists(st.integers(0, 200_000), max_size=30).map(tuple)
bodies = st.one_of(
    st.binary(max_size=100),
    st.builds(
        lambda system, messages: json.dumps({"system": system, "messages": messages}).encode(),
        st.sampled_from(["", "you are " * 30]),
        st.lists(st.sampled_from(["a" * 200, "b", {"role": "user", "content": "c"}]), max_size=8),
    ),
)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Calls in any tree, with or without tokens, each prompt an extension of any part of what came before."""
    calls: list[dict[str, Any]] = []
    for n in range(draw(st.integers(1, 8))):
        parent = draw(st.none() | st.sampled_from(["nobody", *range(n)]))
        before: tuple[int, ...] = ()
        if isinstance(parent, int):
            chosen = calls[parent]
            before = (chosen["prompt_token_ids"] or ()) + (chosen["completion_token_ids"] or ())
        prompt = draw(st.none() | st.tuples(st.integers(0, len(before)), token_ids))
        completion = draw(st.none() | token_ids)
        calls.append(
            {
                "parent_id": f"run-0.1-{parent}" if parent is not None else None,
                "request": draw(bodies),
                "response": draw(st.binary(max_size=60)),
                "prompt_token_ids": None if prompt is None else before[: prompt[0]] + prompt[1],
                "completion_token_ids": completion,
                "logprobs": draw(st.none() | st.lists(st.floats(allow_nan=False), max_size=5).map(tuple)),
                "sampling": draw(st.dictionaries(st.text(max_size=3), st.integers(0, 9), max_size=2)),
                "error": draw(st.none() | st.builds(ErrorInfo, st.just("backend"), st.text(), st.text())),
                "session_id": draw(st.none() | st.text(max_size=4)),
                "usage": Usage(draw(st.integers(0, 9)), cache_write_tokens=draw(st.integers(0, 9))),
                "cost_usd": draw(st.none() | st.floats(0, 9)),
                "policy_spans": draw(st.just(()) | st.just((PolicySpan("v1", 0, 2), PolicySpan("v2")))),
                "audit": draw(st.just({}) | st.dictionaries(st.text(max_size=3), st.integers(), max_size=2)),
            }
        )
    return calls


def come_back_exactly(
    location: StoreLocation, rollout_id: str, fields: list[dict[str, Any]], forget: bool
) -> None:
    """Append calls to a new attempt of a rollout, and read them."""
    store = Store.open(location)
    attempt = running(store, rollout_id)
    expected: list[Call] = []
    for n, changes in enumerate(fields):
        parent = changes["parent_id"]
        parent = parent and parent.replace("run-0.1", attempt.id)
        expected.append(make_call(attempt.id, n, **changes | {"parent_id": parent}))
    for call in expected:
        if forget:  # a writer without any memory of what came before
            store.close()
            store = Store.open(location)
        store.calls.append(call).result()
    with store:
        assert list(store.calls.of_attempt(attempt.id)) == expected
        for call in expected:
            assert store.calls.get(call.id) == call


@settings(max_examples=example_count(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(conversations(), st.booleans())
def test_calls_come_back_exactly(
    tmp_path_factory: pytest.TempPathFactory, given_calls: list[dict[str, Any]], forget: bool
) -> None:
    directory = tmp_path_factory.mktemp("store")
    shutil.copytree(template(tmp_path_factory), directory, dirs_exist_ok=True)
    come_back_exactly(directory, "run-0", given_calls, forget)


def template(factory: pytest.TempPathFactory) -> Path:
    """A store with a queued rollout, made once and copied."""
    directory = factory.getbasetemp() / "template"
    if not directory.exists():
        with Store.open(directory) as store:
            prepare(store)
    return directory


@pytest.mark.services
@settings(
    max_examples=example_count(40),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(conversations(), st.booleans())
def test_calls_come_back_exactly_from_postgresql(
    postgresql_store: StoreUrl, given_calls: list[dict[str, Any]], forget: bool
) -> None:
    with Store.open(postgresql_store) as store:
        rollout_id = f"run-{len(store.runs.rollouts())}"
        prepare(store, int(rollout_id[4:]) + 1)
    come_back_exactly(postgresql_store, rollout_id, given_calls, forget)


def test_a_write_that_fails_does_not_fail_those_beside_it(store: Store) -> None:
    attempt = running(store)
    gate = threading.Event()
    blocked = store._database.writer.submit(lambda _: gate.wait(30))  # so that the rest is one group
    futures = [store.calls.append(make_call(attempt.id if n % 3 else "nobody", n)) for n in range(30)]
    gate.set()
    assert blocked.result()
    for n, future in enumerate(futures):
        if n % 3:
            future.result()
        else:
            with pytest.raises(StoreError, match="not in the store") as refused:
                future.result()
            assert store._database.driver.name in str(refused.value)
    with pytest.raises(NotInStore) as unknown:
        store.runs.mark_running("no-such-attempt").result()
    assert store._database.driver.name in str(unknown.value), "of a write, its class and its store"
    assert [call.sequence for call in store.calls.of_attempt(attempt.id)] == [n for n in range(30) if n % 3]


def test_hostile_values_are_refused_and_the_next_write_goes_on(store: Store) -> None:
    attempt = running(store)
    for bad in (
        {"requested_model": "\ud800"},
        {"started_at": "x" * 3, "sampling": {"a": object()}},
        {"prompt_token_ids": (2**64,)},
        {"sequence": 2**70},
    ):
        with pytest.raises(StoreError):
            store.calls.append(make_call(attempt.id, **bad)).result()
    store.calls.append(make_call(attempt.id)).result()
    assert list(store.calls.of_attempt(attempt.id)) == [make_call(attempt.id)]


def test_many_threads_and_two_stores_in_one_place(location: StoreLocation) -> None:
    with Store.open(location) as one, Store.open(location) as two:
        prepare(one, 8)
        attempts = [running(store, f"run-{n}") for n, store in enumerate([one, two] * 4)]
        shared = json.dumps({"messages": ["the same in every attempt" * 20] * 3}).encode()
        failures: list[StoreError] = []

        def work(store: Store, attempt: Attempt) -> None:
            try:
                for n in range(25):
                    store.calls.append(make_call(attempt.id, n, request=shared)).result()
            except StoreError as error:
                failures.append(error)

        threads = [
            threading.Thread(target=work, args=(store, attempt))
            for store, attempt in zip([one, two] * 4, attempts, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert one.outcomes.counts("run").calls == two.outcomes.counts("run").calls == 200
        for attempt in attempts:
            assert [call.request for call in two.calls.of_attempt(attempt.id)] == [shared] * 25


def test_a_store_is_its_owners_alone(tmp_path: Path) -> None:
    def mode(path: Path) -> int:
        return path.stat().st_mode & 0o777

    with Store.open(tmp_path / "new"):
        assert (mode(tmp_path / "new"), mode(tmp_path / "new" / "store.db")) == (0o700, 0o600)
    (tmp_path / "new").chmod(0o755)
    with Store.open(tmp_path / "new"):  # as an earlier release left it
        assert mode(tmp_path / "new") == 0o700
    (tmp_path / "shared").mkdir(mode=0o755)
    (tmp_path / "shared" / "notes").touch()
    with Store.open(tmp_path / "shared"):
        assert (mode(tmp_path / "shared"), mode(tmp_path / "shared" / "store.db")) == (0o755, 0o600)


# --- sessions ------------------------------------------------------------------------------------------


def test_turns_stored_under_earlier_ids_are_replaced(location: StoreLocation) -> None:
    log = Log("s-one")
    for number in range(3):
        log.user(f"prompt {number}")
        log.assistant(f"msg_{number}", f"answer {number}")
    (former,), (current,) = read(log), read(log)
    former.trace_id = former.session_id = "full"
    current.former_ids = ("full", "never-stored")
    with Store.open(location) as opened:
        store_trace(opened.sessions, former).result()
        store_trace(opened.sessions, current).result()
        (stored,) = traces(opened)
        assert stored.trace_id == "s-one" and opened.sessions.count() == (3, 1)
