"""What is wrong is said clearly, with what to do, and the store stays whole."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from understudy.store import Store
from understudy.tasks.records import dump

from support import UNDERSTUDY, calc_task, statuses, understudy, wait_for

pytestmark = pytest.mark.usefixtures("isolation")


def assert_intact(output: Path) -> None:
    database = sqlite3.connect(output / "store.db")
    assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert database.execute("PRAGMA foreign_key_check").fetchall() == []
    database.close()


def test_no_tasks(tmp_path: Path):
    done = understudy("run", "embedded", cwd=tmp_path)
    assert done.returncode == 2
    assert "understudy tasks make" in done.stderr


def test_a_missing_task_file(tmp_path: Path):
    done = understudy("run", "--tasks", tmp_path / "absent.jsonl")
    assert done.returncode == 2
    assert "absent.jsonl" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_malformed_task_file_names_the_line_and_the_key(tmp_path: Path):
    tasks = tmp_path / "tasks.jsonl"
    good = msgspec.json.encode(calc_task()).decode()
    record = json.loads(good)
    record["instruction"] = 7
    for second, expected in (("{", ":2"), (json.dumps(record), "instruction"), (good, "calc-0")):
        tasks.write_text(f"{good}\n{second}\n")
        done = understudy("run", "--tasks", tasks, "-o", tmp_path / "out")
        assert done.returncode == 2
        assert "task error" in done.stderr
        assert "tasks.jsonl:2" in done.stderr
        assert expected in done.stderr


def test_a_gold_patch_that_does_not_apply_or_does_not_solve(tmp_path: Path):
    task = calc_task()
    unfit = msgspec.structs.replace(
        task, instance_id="unfit", gold_patch=task.gold_patch.replace("x - 1", "x - 9")
    )
    useless = msgspec.structs.replace(
        task, instance_id="useless", instruction="Mend it.", gold_patch=task.gold_patch.replace("x + 1", "x * 1")
    )
    dump([unfit, useless], tmp_path / "tasks.jsonl")
    done = understudy("run", "--tasks", tmp_path / "tasks.jsonl", "-o", tmp_path / "out")
    assert done.returncode == 2
    for expected in ("unfit", "does not apply", "useless", "gold"):
        assert expected in done.stderr
    dump([unfit, calc_task(1)], tmp_path / "mixed.jsonl")
    done = understudy("tasks", "check", tmp_path / "mixed.jsonl", "--json")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert report["accepted"] == ["calc-1"]
    assert report["protection"]["calc-1"]["level"] in ("twins", "partial")
    assert "does not apply" in report["refused"]["unfit"]


def test_a_model_server_that_is_not_there(calc_tasks: Path, tmp_path: Path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
    options = ("--base-url", url, "--backend-model-high", "m", "--tasks", calc_tasks, "-o", tmp_path / "out")
    done = understudy("run", "vllm", "--agent", "shell", "--agent-command", "true", *options)
    assert done.returncode == 2
    assert "backend error" in done.stderr
    assert url.removesuffix("/v1") in done.stderr


@pytest.mark.services  # the CLI asks a dead server ten times before it gives up
@pytest.mark.e2e
@pytest.mark.usefixtures("claude_code")
def test_a_model_server_that_dies_is_an_infrastructure_failure(tmp_path: Path):
    tasks, out = tmp_path / "tasks.jsonl", tmp_path / "out"
    dump([calc_task(number) for number in range(3)], tasks)
    pipe = subprocess.PIPE
    serve = [sys.executable, "-m", "understudy.model.server", "--policy", "oracle", "--tasks", str(tasks)]
    with subprocess.Popen([*serve, "--model-name", "m"], stdout=pipe, stdin=subprocess.DEVNULL) as server:
        assert server.stdout is not None
        url = json.loads(server.stdout.readline())["url"] + "/v1"
        arguments = ["run", "vllm", "--base-url", url, "--backend-model-high", "m", "--tasks", str(tasks)]
        arguments += ["-o", str(out), "-n", "40", "-j", "2", "--json"]
        run = subprocess.Popen([UNDERSTUDY, *arguments], stderr=pipe, stdout=pipe, text=True)
        try:
            wait_for(lambda: statuses(out)["succeeded"] > 0, run)
        finally:
            server.kill()
    _, stderr = run.communicate(timeout=200)
    assert run.returncode == 2
    assert "backend" in stderr
    assert "same command again" in stderr
    assert_intact(out)
    with Store.open(out, create=False) as store:
        assert not {"running", "preparing"} & {rollout.status for rollout in store.runs.rollouts()}
        attempts = [attempt for rollout in store.runs.rollouts() for attempt in store.runs.attempts(rollout.id)]
        failed = [attempt for attempt in attempts if attempt.status == "failed"]
        assert failed
        assert {attempt.error.boundary for attempt in failed if attempt.error} == {"backend"}
        assert all(store.runs.verdict(attempt.id) is None for attempt in failed)


def test_an_agent_that_crashes_is_tried_again_and_reported(calc_tasks: Path, tmp_path: Path):
    out = tmp_path / "out"
    command = "cat > /dev/null; echo no luck >&2; exit 3"
    options = ("--agent", "shell", "--agent-command", command, "--limit", "1", "--tasks", calc_tasks, "-o", out)
    done = understudy("run", *options, "--json")
    assert done.returncode == 1
    summary = json.loads(done.stdout)
    assert (summary["rollouts"], summary["infrastructure_failures"], summary["unsolved"]) == (1, 1, 0)
    with Store.open(out, create=False) as store:
        attempts = store.runs.attempts(store.runs.rollouts()[0].id)
    assert len(attempts) == 3
    assert attempts[0].error is not None
    assert "exit code 3" in attempts[0].error.message
    assert "no luck" in attempts[0].error.message


def test_one_directory_is_used_by_one_run_at_a_time(calc_tasks: Path, tmp_path: Path):
    out = tmp_path / "out"
    slow = ("run", "--agent", "shell", "--agent-command", "sleep 20", "--tasks", str(calc_tasks), "-o", str(out))
    pipe = subprocess.PIPE
    first = subprocess.Popen([UNDERSTUDY, *slow], stderr=pipe, stdout=pipe, text=True)
    try:
        wait_for(lambda: statuses(out)["running"] > 0, first)
        done = understudy(*slow)
        assert done.returncode == 2
        assert "another run is using" in done.stderr
    finally:
        for _ in range(2):
            first.send_signal(signal.SIGINT)
            time.sleep(0.5)
        first.communicate(timeout=30)
    assert first.returncode == 130


def test_a_taken_port(calc_tasks: Path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        serve = [sys.executable, "-m", "understudy.model.server", "--policy", "idle", "--port", port]
        done = subprocess.run(
            serve, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=30, check=False
        )
    assert done.returncode == 2
    assert port in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.e2e
@pytest.mark.usefixtures("claude_code")
def test_a_full_disk(tmp_path: Path):
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    tasks, disk = tmp_path / "tasks.jsonl", tmp_path / "disk"
    dump([calc_task(number) for number in range(4)], tasks)
    disk.mkdir()
    check = "import sqlite3,sys; print(sqlite3.connect(sys.argv[1]).execute('pragma integrity_check').fetchall())"
    script = (
        f"mount -t tmpfs -o size=700k tmpfs {disk} && "
        f"{UNDERSTUDY} run embedded --tasks {tasks} -n 40 -j 2 -o {disk}/out; echo code $?; "
        f'mount -o remount,size=64m {disk} && {sys.executable} -c "{check}" {disk}/out/store.db'
    )
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", script],
        capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=240, check=False,
    )  # fmt: skip
    assert "code 2" in done.stdout, done.stderr
    assert "store error" in done.stderr
    assert "disk" in done.stderr
    assert "Traceback" not in done.stderr
    assert "[('ok',)]" in done.stdout


def test_an_unknown_backend_agent_sandbox_or_policy(calc_tasks: Path, tmp_path: Path):
    base = ("--tasks", calc_tasks, "-o", tmp_path / "out")
    for arguments, expected in (
        (("run", "nonsense"), "embedded, vllm"),
        (("run", "--agent", "nonsense"), "qwen-code, shell"),
        (("run", "--sandbox", "nonsense"), "local, ssh, unsafe-local"),
        (("run", "--agent", "shell"), "--agent-command"),
        (("run", "--policy", "nonsense", "--agent", "shell", "--agent-command", "true"), "oracle"),
        (("run", "--policy-arg", "p"), "KEY=VALUE"),
        (
            ("run", "vllm", "--base-url", "http://me:secret@localhost/v1", "--backend-model-high", "m"),
            "a password in the address",
        ),
    ):
        done = understudy(*arguments, *base)
        assert done.returncode == 2, arguments
        assert expected in done.stderr, done.stderr
        assert "Traceback" not in done.stderr
