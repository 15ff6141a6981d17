"""`understudy view` as a process: how it ends, and what it says of a port, browser or store it cannot have."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from support import UNDERSTUDY, understudy
from support.export import put_rollouts
from support.viewer import read


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERSTUDY_CACHE", str(tmp_path / "cache"))


@contextmanager
def viewer(*arguments: object, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A viewer as a process, which must end by itself once it gets SIGINT."""
    command = [str(UNDERSTUDY), "view", *map(str, arguments), "--port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env={**os.environ, **environment}, **pipes) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def test_ctrl_c_ends_it_without_a_word(tmp_path: Path):
    put_rollouts(tmp_path / "run", tasks=1, samples=1)
    with viewer(tmp_path, "--json") as process:
        assert process.stdout is not None and process.stderr is not None
        url = json.loads(process.stdout.readline())["url"].rstrip("/")
        assert len(read(url, "/api/stores")["stores"]) == 1
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode in (0, 130) and out == "" and "Traceback" not in err


def test_the_printed_address_of_every_interface_can_be_opened(tmp_path: Path):
    put_rollouts(tmp_path / "run", tasks=1, samples=1)
    with viewer(tmp_path, "--json", "--host", "0.0.0.0") as process:
        assert process.stdout is not None
        url, _, token = json.loads(process.stdout.readline())["url"].partition("/?token=")
        assert "0.0.0.0" not in url
        assert len(read(url, f"/api/stores?token={token}")["stores"]) == 1


def test_a_port_that_is_taken_is_said_in_words(tmp_path: Path):
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        done = understudy("view", tmp_path, "--port", listener.getsockname()[1], "--no-browser")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "in use" in done.stderr


def test_without_a_browser_the_address_is_printed(tmp_path: Path):
    with viewer(tmp_path, PATH="/nonexistent", DISPLAY="", BROWSER="") as process:
        assert process.stdout is not None and process.stderr is not None
        assert "the viewer is at http://127.0.0.1:" in process.stdout.readline()
        assert "no browser could be opened" in process.stderr.readline()


def test_stores_that_cannot_be_read_are_listed_with_the_reason(tmp_path: Path):
    for name in ("fine", "corrupt", "newer"):
        put_rollouts(tmp_path / name, tasks=1, samples=1)
    content = bytearray((tmp_path / "corrupt/store.db").read_bytes())
    content[:4_096] = b"\0" * 4_096
    (tmp_path / "corrupt/store.db").write_bytes(content)
    with closing(sqlite3.connect(tmp_path / "newer/store.db")) as database, database:
        database.execute("UPDATE alembic_version SET version_num = '9999'")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/store.db").write_bytes(b"")
    before = {path: path.read_bytes() for path in sorted(tmp_path.glob("*/store.db"))}
    with viewer(tmp_path, "--json", "--read-only") as process:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"].rstrip("/")
        stores = {each["name"]: each for each in read(url, "/api/stores")["stores"]}
    assert stores["fine"]["state"] == "ok"
    for name in ("corrupt", "newer", "empty"):
        assert stores[name]["state"] == "unreadable", name
        assert stores[name]["error"]["message"] and stores[name]["error"]["remedy"], name
    assert {path: path.read_bytes() for path in before} == before
    missing = understudy("view", tmp_path / "none", "--no-browser")
    assert missing.returncode == 2 and "does not exist; give a directory" in missing.stderr
