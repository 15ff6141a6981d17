"""The commands on a store in PostgreSQL, as a user runs them; the password of its URL is shown nowhere."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest

from understudy.store import Store
from understudy.store.address import StoreUrl
from understudy.store.copying import copy_store
from understudy.tasks.records import dump

from fakes.vllm import FakeVLLM, Say
from support import calc_task, understudy
from support.claude_log import Log
from support.export import put_rollouts
from support.postgresql import PASSWORD
from support.replay import OpenAITeacher, fill, session, table, teachers_of
from support.serve import Served, gateway

pytestmark = [pytest.mark.services, pytest.mark.e2e]


def test_a_run_in_a_database_is_reported_as_the_same_run_in_a_directory(
    tmp_path: Path, postgresql_store: StoreUrl
) -> None:
    for location in (tmp_path / "run", postgresql_store):
        put_rollouts(location, tasks=3, samples=2)
    labels = ("--label", "first", "--label", "second")
    done = understudy("report", "run", postgresql_store.secret_url, *labels, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)["points"]
    assert first["solved"] + first["unsolved"] == 6
    differing = {"label", "directory", "seconds"}
    assert {name: value for name, value in first.items() if name not in differing} == {
        name: value for name, value in second.items() if name not in differing
    }
    alone = understudy("report", postgresql_store.secret_url, "--png", cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    assert {each.name for each in tmp_path.iterdir()} == {"run", "report.html", "report.png"}
    page = (tmp_path / "report.html").read_text()
    assert "calc-0" in page
    for text in (done.stdout, done.stderr, alone.stdout, alone.stderr, page):
        assert PASSWORD not in text


def test_logs_are_read_into_a_database_as_into_a_directory(tmp_path: Path, postgresql_store: StoreUrl) -> None:
    log = Log()
    log.user("hello")
    log.assistant("m1", "hi")
    (tmp_path / "s1.jsonl").write_bytes(log.data())
    for location in ("store", postgresql_store.secret_url):
        done = understudy("ingest", "s1.jsonl", "--dir", location, "-j", 1, "--json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["new"] == 1 and PASSWORD not in done.stdout + done.stderr
    again = understudy("ingest", "s1.jsonl", "--dir", postgresql_store.secret_url, "-j", 1, cwd=tmp_path)
    assert "1 files are unchanged" in again.stdout and PASSWORD not in again.stdout + again.stderr
    assert {each.name for each in tmp_path.iterdir()} == {"s1.jsonl", "store"}
    with Store.open(tmp_path / "store") as first, Store.open(postgresql_store) as second:
        assert first.sessions.count() == second.sessions.count() == (1, 1)


def files_of(directory: Path) -> list[Path]:
    """The files in a directory."""
    return [each for each in directory.iterdir() if each.is_file()]


def content_of(file: Path) -> str:
    """What is in a file."""
    return file.read_bytes().decode()


async def test_one_gateway_answers_the_clients_of_a_database(tmp_path: Path, postgresql_store: StoreUrl) -> None:
    option = ("--store", postgresql_store.secret_url)
    async with FakeVLLM(default=Say(text="here")) as model, aiohttp.ClientSession() as http:
        arguments = ("vllm", "--base-url", model.url, "--backend-model-high", "fake", *option)
        async with Served(tmp_path / "one", *arguments, "--workers", "2") as served:
            key = await gateway("issue", "me", *option)
            status, body = await served.ask(http, key, "hi")
            assert status == 200
            assert (await gateway("keys", *option)).splitlines() == ["default\tworks", "me\tworks"]
            for pid in served.workers():
                assert PASSWORD not in content_of(Path(f"/proc/{pid}/cmdline"))
            with pytest.raises(AssertionError, match="name that database with --store"):
                await gateway("issue", "me", "--dir", str(tmp_path / "one"))
            with pytest.raises(AssertionError, match="another gateway already serves this store"):
                await Served(tmp_path / "two", *arguments).start()
            listed = await asyncio.to_thread(understudy, "status", postgresql_store.secret_url)
            assert "the clients of a gateway" in listed.stdout
        async with Served(tmp_path / "two", *arguments) as moved:
            assert (await moved.ask(http, key, "again"))[0] == 200
            assert await moved.stop() == 0
        assert PASSWORD.encode() not in served.stderr + moved.stderr
    for directory in ("one", "two"):
        files = {each.name: content_of(each) for each in files_of(tmp_path / directory)}
        assert "admin.key" in files and "store.db" not in files and PASSWORD not in "".join(files.values())
    with Store.open(postgresql_store, create=False) as store:
        first, second = store.calls.of_attempt("client-me")
        assert (first.sequence, second.sequence) == (0, 1)
        assert json.loads(first.response)["id"] == json.loads(body)["id"]


@pytest.mark.usefixtures("isolation")
def test_a_run_in_a_database_is_graded_anew(tmp_path: Path, postgresql_store: StoreUrl) -> None:
    dump([calc_task(0)], tmp_path / "tasks.jsonl")
    mend = "sed -i 's/x - 1/x + 1/' calc.py"
    output_options = ("-o", tmp_path / "out", "--store", postgresql_store.secret_url)
    done = understudy(
        *("run", "embedded", "--policy", "idle", "--tasks", tmp_path / "tasks.jsonl", *output_options),
        *("--agent", "shell", "--agent-command", mend, "--json"),
    )
    assert done.returncode == 0 and json.loads(done.stdout)["solved"] == 1, done.stderr
    arguments = ("grade", "--regrade", postgresql_store.secret_url, "-o", tmp_path / "again", "--json")
    with Store.open(postgresql_store) as store, store.hold(".lock", busy="x"):
        refused = understudy(*arguments)
    assert refused.returncode == 2 and "another process works on postgresql://postgres@/" in refused.stderr
    done = understudy(*arguments)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["rollouts"], summary["solved"], summary["changed"]) == (1, 1, {})
    assert (tmp_path / "again" / "logs" / "calc-0" / "rollout.json").exists()
    with Store.open(postgresql_store) as store:
        (graded,) = store.outcomes.decisions()
        assert len(graded.verdict.earlier) == 1
    assert PASSWORD not in done.stdout + done.stderr + refused.stderr


async def test_teachers_are_asked_about_the_sessions_in_a_database(
    tmp_path: Path, postgresql_store: StoreUrl
) -> None:
    fill(tmp_path / "s", session("a"))
    with Store.open(tmp_path / "s") as source, Store.open(postgresql_store) as target:
        copy_store(source, target)
    async with OpenAITeacher() as gpt:
        file = teachers_of(tmp_path, table("gpt", gpt, family="gpt"))
        arguments = ("replay", postgresql_store.secret_url, "-t", file)
        for request_count in (1, 1):
            done = await asyncio.to_thread(understudy, *arguments)
            assert done.returncode == 0, done.stderr
            assert len(gpt.requests) == request_count
        with Store.open(postgresql_store) as store, store.hold(".replay-replay.lock", busy="x"):
            refused = await asyncio.to_thread(understudy, *arguments)
    assert refused.returncode == 2 and "another process is at work on the replay" in refused.stderr
    assert PASSWORD not in done.stdout + done.stderr + refused.stderr


def test_a_directory_is_no_database(tmp_path: Path) -> None:
    done = understudy("gateway", "issue", "me", "--store", "runs/one", cwd=tmp_path)
    assert done.returncode == 2
    assert (
        "--store: 'runs/one' is not the URL of a database; give one such as postgresql://USER@HOST/NAME"
        in done.stderr
    )
