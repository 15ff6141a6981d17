"""Workers on one store: killed, stopped, of another release; each rollout ends once, no answered call is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psycopg
import pytest

from understudy import __version__
from understudy.store import Store
from understudy.store.address import StoreLocation, StoreUrl
from understudy.tasks.records import dump

from support import UNDERSTUDY, calc_task, understudy, wait_for
from support.postgresql import running_server
from support.workers import LEASE_S, check, enqueue, options, running, started, text_of, worker

pytestmark = [pytest.mark.services, pytest.mark.e2e]


def test_a_killed_workers_rollouts_are_finished_by_another(tmp_path: Path, location: StoreLocation) -> None:
    queued = enqueue(tmp_path, location, "--engine", "detached")
    assert queued.returncode == 0, queued.stderr
    assert json.loads(queued.stdout)["pending"] == 12
    with worker(location) as first:
        wait_for(lambda: running(location) == 2, first)
        os.killpg(first.pid, signal.SIGKILL)
    with worker(location, "--stop-when-idle") as second:
        wait_for(lambda: running(location) > 0, second)
        done = enqueue(tmp_path, location, "--engine", "workers")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["rollouts"], summary["pending"], summary["infrastructure_failures"]) == (12, 0, 0)
    ends = check(tmp_path, location, 12)
    assert ends["unresponsive"] >= 1 and set(ends) <= {"succeeded", "unresponsive"}
    assert len(list((tmp_path / "out").glob("stream_*.json"))) == 12


def test_a_worker_that_is_told_to_stop_finishes_what_it_has_and_another_goes_on(
    tmp_path: Path, postgresql_store: StoreUrl
) -> None:
    assert enqueue(tmp_path, postgresql_store, "--engine", "detached", samples=2).returncode == 0
    with worker(postgresql_store) as first:
        wait_for(lambda: running(postgresql_store) == 2, first)
        first.send_signal(signal.SIGTERM)
        _, stderr = first.communicate(timeout=60)
        assert first.returncode == 0, stderr
        assert "has ended, " in stderr
    with Store.open(postgresql_store) as store:
        assert all(not store.leases.holders(run.id) for run in store.runs.all())
    with worker(postgresql_store, "--stop-when-idle") as second:
        _, stderr = second.communicate(timeout=120)
        assert second.returncode == 0, stderr
    assert check(tmp_path, postgresql_store, 8) == {"succeeded": 8}


def test_a_run_of_another_release_is_left_alone_and_bad_stores_are_refused(
    tmp_path: Path, postgresql_store: StoreUrl
) -> None:
    assert enqueue(tmp_path, postgresql_store, "--engine", "detached", samples=1).returncode == 0
    with Store.open(postgresql_store) as store:
        run = store.runs.all()[0]
        store.leases.open_to_workers(run.id, "99.0").result()
    done = understudy("worker", "--store", postgresql_store.secret_url, "--stop-when-idle")
    assert done.returncode == 0
    assert f"run {run.id} is left to other workers: it was enqueued by Understudy 99.0" in done.stderr
    assert "not-a-secret" not in done.stderr
    wrong = postgresql_store.secret_url.replace("not-a-secret", "wrong-password")
    refused = understudy("worker", "--store", wrong)
    assert refused.returncode == 2 and "refused the user" in refused.stderr
    assert "wrong-password" not in refused.stderr and "Traceback" not in refused.stderr


def said_until(process: subprocess.Popen[str], sign: str) -> str:
    """What a process writes to stderr up to the line with a sign in it."""
    assert process.stderr is not None
    output = ""
    for line in process.stderr:
        output += line
        if sign in line:
            return output
    raise AssertionError(output)


def test_a_worker_whose_attempts_fail_in_a_row_rests_and_who_waits_is_told_why(
    tmp_path: Path, location: StoreLocation
) -> None:
    failing = options(tmp_path, location, "--engine", "workers", samples=2, command="kill -9 $$")
    with started(UNDERSTUDY, *failing) as waiting:
        said_until(waiting, "no worker is there; start some with: understudy worker --store")
        # Nothing can be claimed during the rest, but the worker is not done.
        with worker(location, "-j", "1", "--stop-when-idle") as lonely:
            output = said_until(lonely, "rests for 30 s, then one rollout is tried: 4 attempts in a row failed at")
            assert "at the agent: --agent-command ended with exit code -9" in output
            said_until(waiting, "no worker takes it: ")
            with Store.open(location) as store:
                (run,) = store.runs.all()
                (alone,) = store.leases.workers()
                assert list(alone.leaves) == [run.id] and "4 attempts in a row" in alone.leaves[run.id]
                completed = understudy("status", text_of(location), "--json")
                assert completed.returncode == 0, completed.stderr
                status = json.loads(completed.stdout)
                assert list(status["runs"][0]["faults"]) == ["agent"]
                assert [each["leaves"] for each in status["workers"]] == [alone.leaves]
                assert "not-a-secret" not in completed.stdout
                ended = [each for rollout in store.runs.rollouts() for each in store.runs.attempts(rollout.id)]
                assert 4 <= len(ended) < 8  # after a rest one is tried


def test_a_worker_that_stops_when_idle_tries_a_rollout_again_before(
    tmp_path: Path, location: StoreLocation
) -> None:
    dump([calc_task(0)], tmp_path / "tasks.jsonl")
    assert enqueue(tmp_path, location, "--engine", "detached", samples=1, command="kill -9 $$").returncode == 0
    with worker(location, "--stop-when-idle") as alone:
        _, stderr = alone.communicate(timeout=120)
    assert alone.returncode == 0 and "3 attempts ended here" in stderr
    with Store.open(location) as store:
        (rollout,) = store.runs.rollouts()
        assert rollout.status == "failed"


def test_a_run_whose_remote_machine_is_away_is_tried_again_later(tmp_path: Path, location: StoreLocation) -> None:
    assert enqueue(tmp_path, location, "--engine", "detached", samples=1).returncode == 0
    with Store.open(location) as store:
        (run,) = store.runs.all()
        remote = {**run.config, "sandbox": "ssh:nobody@no-such-host.invalid"}
        store.runs.create("remote", remote).result()
        store.runs.add_tasks("remote", [calc_task(0)]).result()
        store.runs.create_rollouts("remote", [("r", calc_task(0).instance_id, 0)]).result()
        store.leases.open_to_workers("remote", __version__).result()
    with worker(location) as alone:
        output = said_until(alone, "run remote ")
    assert "run remote cannot be begun yet, next try in 30 s: ssh nobody@no-such-host.invalid: " in output


def test_a_run_that_a_process_executes_alone_is_refused_to_others(tmp_path: Path, location: StoreLocation) -> None:
    options(tmp_path, location)
    go = tmp_path / "go"
    command = f"python3 {tmp_path / 'client.py'} 3 {tmp_path / 'seen'}; until test -e {go}; do sleep 0.1; done"
    with started(UNDERSTUDY, *options(tmp_path, location, command=command)) as alone:
        wait_for(lambda: (tmp_path / "seen").exists(), alone)
        for engine in ("local", "detached"):
            other = options(tmp_path, location, "--engine", engine, command=command)
            other[other.index("-o") + 1] = f"{tmp_path / engine}"
            refused = understudy(*other)
            assert refused.returncode == 2
            assert "another run is using the store" in refused.stderr or "is being executed by" in refused.stderr
            assert "not-a-secret" not in refused.stderr
        go.touch()
        out, stderr = alone.communicate(timeout=120)
        assert alone.returncode == 0, stderr
    assert json.loads(out)["pending"] == 0
    assert check(tmp_path, location, 12) == {"succeeded": 12}
    assert enqueue(tmp_path, location, "--engine", "detached", command=command).returncode == 0


@pytest.mark.usefixtures("claude_code", "isolation")
def test_the_real_cli_is_run_by_workers(tmp_path: Path, postgresql_store: StoreUrl) -> None:
    dump([calc_task(number) for number in range(2)], tmp_path / "tasks.jsonl")
    url = postgresql_store.secret_url
    arguments = (
        "run",
        "embedded",
        "--tasks",
        tmp_path / "tasks.jsonl",
        "-o",
        tmp_path / "out",
        "--store",
        url,
        "--json",
    )
    with worker(postgresql_store):
        done = understudy(*arguments, "--engine", "workers")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["solved"] == 2
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or b"not-a-secret" not in path.read_bytes(), path


def test_a_run_ends_with_the_reason_when_its_calls_cannot_be_stored_and_goes_on_later(
    tmp_path: Path, postgresql_store: StoreUrl
) -> None:
    fail = """
        CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql
        AS $$ BEGIN RAISE 'could not extend file' USING ERRCODE = 'disk_full'; END $$;
        CREATE TRIGGER fail BEFORE INSERT ON calls EXECUTE FUNCTION fail()
    """
    with psycopg.connect(postgresql_store.secret_url, autocommit=True) as database:
        with Store.open(postgresql_store):
            database.execute(fail)
        failed = enqueue(tmp_path, postgresql_store, samples=2)
        database.execute("DROP TRIGGER fail ON calls")
    assert failed.returncode == 2 and "attempts in a row failed at the gateway" in failed.stderr
    assert "the agent's latest call could not be stored" in failed.stderr
    assert "the server's disk is full" in failed.stderr and "run the same command again" in failed.stderr
    done = enqueue(tmp_path, postgresql_store, samples=2)
    assert done.returncode == 0, done.stderr
    assert check(tmp_path, postgresql_store, 8)["succeeded"] == 8


def test_what_was_read_as_the_server_broke_off_is_read_again(tmp_path: Path, postgresql_store: StoreUrl) -> None:
    def break_off(table: str) -> None:
        """End the connection of a read that waits for a table's lock."""
        with psycopg.connect(postgresql_store.secret_url) as database:
            database.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE".encode())
            query = f"SELECT pid FROM pg_locks WHERE NOT granted AND relation = '{table}'::regclass".encode()
            while (waiting := database.execute(query).fetchone()) is None:
                time.sleep(0.05)
            database.execute("SELECT pg_terminate_backend(%s)", waiting)

    with started(UNDERSTUDY, *options(tmp_path, postgresql_store, "--engine", "workers", samples=1)) as run:
        said_until(run, "no worker is there")
        break_off("calls")
        with worker(postgresql_store) as working:
            break_off("runs")
            out, stderr = run.communicate(timeout=120)
            assert working.poll() is None
    assert run.returncode == 0, stderr
    assert json.loads(out)["pending"] == 0
    assert check(tmp_path, postgresql_store, 4) == {"succeeded": 4}


def test_a_database_that_goes_away_for_a_while_is_waited_for(tmp_path: Path) -> None:
    with running_server() as server:
        url = server.new_store()
        assert enqueue(tmp_path, url, "--engine", "detached", samples=1).returncode == 0
        with worker(url, "--stop-when-idle") as working:
            wait_for(lambda: running(url) == 2, working)
            server.stop()
            time.sleep(LEASE_S + 1.0)
            server.start()
            _, stderr = working.communicate(timeout=120)
        assert working.returncode == 0, stderr
        ends = check(tmp_path, url, 4)
        assert set(ends) <= {"succeeded", "unresponsive"} and ends["succeeded"] == 4
