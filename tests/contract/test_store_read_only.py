"""A store on a medium that cannot be written: a snapshot, somebody else's directory, a mounted disk."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from understudy.store import Store
from understudy.store.sqlite import FILE

from support import UNDERSTUDY
from support.export import put_rollouts, put_sessions, session

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="a read-only mount is made by bubblewrap")


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    put_rollouts(tmp_path / "store")
    put_sessions(tmp_path / "store", [session("s0", project="/srv/p0")])
    return tmp_path / "store"


def read_only(directory: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command that sees the directory as a read-only mount."""
    bwrap = ("bwrap", "--dev-bind", "/", "/", "--ro-bind", directory, directory)
    return subprocess.run(
        list(map(str, (*bwrap, *command))), capture_output=True, text=True, check=False, timeout=120
    )


def test_it_is_shown_exported_and_searched(stored: Path, tmp_path: Path):
    before = sorted(path.name for path in stored.iterdir())
    completed = read_only(stored, UNDERSTUDY, "show", "--dir", stored)
    assert completed.returncode == 0, completed.stderr
    exported = read_only(stored, UNDERSTUDY, "export", "trl-sft", stored, "-o", tmp_path / "out", "--json")
    assert exported.returncode == 0, exported.stderr
    assert (tmp_path / "out").is_dir()
    states = read_only(stored, UNDERSTUDY, "states", stored, "--where", "tool_errors >= 0")
    assert states.returncode == 0, states.stderr
    assert sorted(path.name for path in stored.iterdir()) == before


def test_it_is_read_beside_one_who_writes(stored: Path):
    with Store.open(stored) as writing:
        writing.runs.create("later", {}).result()
        done = read_only(stored, sys.executable, "-c", RUNS, stored)
        assert done.returncode == 0, done.stderr
        assert "later" in json.loads(done.stdout)


def test_a_log_that_cannot_be_read_is_said(stored: Path, tmp_path: Path):
    """As of a copy that left out the index, or of a machine that went down."""
    copy = tmp_path / "copy"
    copy.mkdir()
    with Store.open(stored) as writing:
        writing.runs.create("later", {}).result()
        for name in (FILE, f"{FILE}-wal"):
            shutil.copyfile(stored / name, copy / name)
    done = read_only(copy, UNDERSTUDY, "show", "--dir", copy)
    assert done.returncode == 2
    assert "copy the directory" in done.stderr
    assert "Traceback" not in done.stderr
    # Where it can be written, the log is taken in.
    with Store.open(copy) as store:
        assert "later" in [run.id for run in store.runs.all()]


def test_writing_into_it_and_bringing_it_up_are_refused(stored: Path, tmp_path: Path):
    done = read_only(stored, sys.executable, "-c", WRITE, stored)
    assert done.returncode == 0, done.stderr
    assert "read-only" in done.stdout
    old = tmp_path / "old"
    old.mkdir()
    raw = sqlite3.connect(old / FILE)
    raw.executescript((Path(__file__).parents[1] / "data" / "store_0003.sql").read_text())
    raw.close()
    done = read_only(old, UNDERSTUDY, "show", "--dir", old)
    assert done.returncode == 2
    assert "copy its directory" in done.stderr


def test_one_of_the_release_before_is_read_as_it_is(tmp_path: Path):
    raw = sqlite3.connect(tmp_path / FILE)
    raw.executescript((Path(__file__).parents[1] / "data" / "store_0004.sql").read_text())
    raw.close()
    before = (tmp_path / FILE).read_bytes()
    done = read_only(tmp_path, UNDERSTUDY, "show", "--dir", tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    agents = {rollout["id"]: rollout["agent"] for rollout in json.loads(done.stdout)["rollouts"]}
    assert agents["run-0"] == {"name": "claude-code", "version": None}
    assert agents["shell-0"] == {"name": "shell", "version": None}
    done = read_only(tmp_path, sys.executable, "-c", WRITE, tmp_path)
    assert "read-only" in done.stdout, done.stderr
    assert (tmp_path / FILE).read_bytes() == before


def test_states_of_the_first_release_are_counted_where_they_cannot_be_migrated(tmp_path: Path):
    with tarfile.open(Path(__file__).parents[1] / "data/v0_1/sessions.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    with Store.open(tmp_path / "sessions", create=False, read_only=True) as store:
        assert store.sessions.count() == (63, 18)
        assert store.sessions.count("tool_errors > 0") == (8, 4)


RUNS = """
import json, sys
from pathlib import Path
from understudy.store import Store
with Store.open(Path(sys.argv[1]), create=False) as store:
    print(json.dumps([run.id for run in store.runs.all()]))
"""
WRITE = """
import sys
import tarfile
from pathlib import Path
from understudy.errors import StoreError
from understudy.store import Store
with Store.open(Path(sys.argv[1]), create=False) as store:
    try:
        store.runs.create("new", {}).result()
    except StoreError as error:
        print(error)
"""
