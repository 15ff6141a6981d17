"""`understudy ingest` again, into a file and into a store; and `understudy states`, which reads the store."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from understudy.ingest import trace_store

from support import UNDERSTUDY, understudy, wait_for
from support.claude_log import Log

DATA = Path(__file__).parents[2] / "data" / "ingest"


def session(name: str, turns: int = 2, key: str = "m", **envelope: Any) -> Log:
    log = Log(name, **envelope)
    log.user(f"do {name}")
    for turn in range(turns - 1):
        log.assistant(f"{name}-{key}{turn}", (f"{name}-t{turn}", "Bash"))
        log.result(f"{name}-t{turn}", "done")
    log.assistant(f"{name}-{key}{turns - 1}", "all done", stop="end_turn")
    return log


PADDING = b'{"type":"queue-operation","pad":"' + b"x" * 5_000_000 + b'"}\n'
"""Logs with it are too large to be read by one process together."""


def lay(root: Path, *logs: Log, directory: str, padding: bytes = b"") -> Path:
    project = root / directory
    project.mkdir(parents=True, exist_ok=True)
    for log in logs:
        (project / f"{log.envelope['sessionId']}.jsonl").write_bytes(log.data() + padding)
    return project


def told(*arguments: str | Path, code: int = 0) -> dict[str, Any]:
    done = understudy("ingest", *map(str, arguments), "--json")
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def figures(counts: dict[str, Any], *names: str) -> tuple[int, ...]:
    return tuple(counts[name] for name in names)


# --- into a file ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["states.jsonl", "states.parquet"])
def test_ingesting_unchanged_logs_again_does_not_rewrite_the_output(name: str, tmp_path: Path):
    lay(tmp_path / "logs", session("a"), session("b"), directory="p1")
    output = tmp_path / name
    first = told(tmp_path / "logs", "--output", output)
    before = output.stat()
    again = told(tmp_path / "logs", "--output", output)
    assert again == first | {"unchanged": 2}
    assert (output.stat().st_ino, output.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert stat.S_IMODE((tmp_path / f".{name}.understudy").stat().st_mode) == 0o600
    done = understudy("ingest", str(tmp_path / "logs"), "--output", str(output))
    assert "2 files (all unchanged)" in done.stdout


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_changed_logs_are_read_again_and_rows_of_unchanged_ones_copied(jobs: str, tmp_path: Path):
    logs, padding = tmp_path / "logs", PADDING if jobs == "2" else b""
    for name in ("a", "b", "c"):
        lay(logs, session(name), directory=name, padding=padding)
    output, fresh = tmp_path / "states.jsonl", tmp_path / "fresh.jsonl"
    told(logs, "--output", output, "--jobs", jobs)
    lay(logs, session("b", turns=4), directory="b", padding=padding)
    shutil.rmtree(logs / "c")
    lay(logs, session("d"), directory="d", padding=padding)
    assert figures(told(logs, "--output", output, "--jobs", jobs), "files", "unchanged", "states") == (3, 1, 8)
    told(logs, "--output", fresh, "--jobs", jobs)
    assert output.read_bytes() == fresh.read_bytes()


def test_another_selection_or_a_changed_output_is_ingested_from_scratch(tmp_path: Path):
    logs = lay(tmp_path, session("a"), session("b", turns=3), directory="logs")
    output = tmp_path / "states.jsonl"
    told(logs, "--output", output)
    assert figures(told(logs, "--output", output, "--min-turns", "3"), "unchanged", "states") == (0, 3)
    output.write_text("other\n")
    assert told(logs, "--output", output, "--min-turns", "3")["unchanged"] == 0
    assert len(rows(output)) == 3


@pytest.mark.parametrize("jobs", ["1", "2"])
@pytest.mark.parametrize("name", ["states.jsonl", "states.parquet"])
def test_a_conversation_in_two_places_is_written_once(jobs: str, name: str, tmp_path: Path):
    padding = PADDING if jobs == "2" else b""
    logs = tmp_path / "logs"
    lay(logs, session("a", turns=3), directory="p1", padding=padding)
    lay(logs, session("a", turns=5), session("b"), directory="p2", padding=padding)
    output = tmp_path / name

    def ids() -> list[str]:
        states = rows(output) if name.endswith("l") else list(rows_back(output))
        return [row["message_id"] for row in states]

    once = ["a-m0", "a-m1", "a-m2"]
    counts = told(logs, "--output", output, "--jobs", jobs)
    assert figures(counts, "states", "duplicates", "files") == (7, 3, 3)
    assert counts["formats"] == {"claude-code": 7}
    assert ids() == [*once, "a-m3", "a-m4", "b-m0", "b-m1"]
    dry = told(logs, "--dry-run", "--jobs", jobs)
    assert figures(dry, "states", "duplicates") == (7, 3)
    # The other's own states come back when the first is gone, though the file of the other is as it was.
    shutil.rmtree(logs / "p1")
    assert figures(told(logs, "--output", output), "states", "duplicates", "unchanged") == (7, 0, 0)
    assert ids() == [*once, "a-m3", "a-m4", "b-m0", "b-m1"]
    lay(logs, session("a", turns=4), directory="p0")
    assert figures(told(logs, "--output", output), "states", "duplicates") == (7, 4)
    assert sorted(ids()) == sorted([*once, "a-m3", "a-m4", "b-m0", "b-m1"])


def test_writing_parquet_imports_no_pandas(tmp_path: Path):
    logs = lay(tmp_path, session("a"), directory="logs")
    program = (
        "import sys\nfrom understudy.cli.main import main\n"
        f"sys.argv[1:] = ['ingest', {str(logs)!r}, '--output', {str(tmp_path / 'states.parquet')!r}]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "assert 'pyarrow' in sys.modules and 'pandas' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)


def test_parquet_rows_equal_the_jsonl_rows_and_load_as_a_dataset(tmp_path: Path):
    told(DATA, "--output", tmp_path / "states.jsonl")
    told(DATA, "--output", tmp_path / "states.parquet")
    lines = rows(tmp_path / "states.jsonl")
    assert list(rows_back(tmp_path / "states.parquet")) == lines
    assert stat.S_IMODE((tmp_path / "states.parquet").stat().st_mode) == 0o600
    code = (
        "import datasets, sys; rows = datasets.load_dataset('parquet', data_files=sys.argv[1], split='train'); "
        "print(len(rows), rows[0]['messages'][0]['role'], rows[0]['student_action']['thinking_hidden'])"
    )
    home = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    python = Path(UNDERSTUDY).parent / "python"
    done = subprocess.run(
        [python, "-c", code, tmp_path / "states.parquet"],
        capture_output=True, text=True, env={**os.environ, **home}, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[:2] == [str(len(lines)), "system"]


def test_redacted_lines_hold_no_secret(tmp_path: Path):
    secret = "AKIAQ3EGRFTAV7WX5LSN"
    logs = lay(tmp_path, session("a", cwd="/home/jane/work"), directory="logs")
    with (logs / "a.jsonl").open("ab") as log:
        more = Log("b")
        more.user(f"the key is {secret}")
        more.assistant("b-m0", f"you said {secret}", stop="end_turn")
        log.write(more.data())
    env = {"XDG_DATA_HOME": str(tmp_path / "data")}
    for _ in range(2):
        done = understudy("ingest", str(logs), "-o", str(tmp_path / "s.jsonl"), "--redact", env=env)
        assert done.returncode == 0, done.stderr
        assert "redacted: " in done.stdout and "do not share it" not in done.stderr
        text = (tmp_path / "s.jsonl").read_text()
        assert secret not in text and "jane" not in text.replace(str(tmp_path), "")


# --- into a store --------------------------------------------------------------------------------------


def test_a_store_is_the_default_and_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    logs = lay(tmp_path, session("a"), session("b", turns=3), directory="logs")
    done = understudy("ingest", str(logs))
    assert done.returncode == 0, done.stderr
    assert "5 states of 2 conversations in 2 files were read: 5 new, 0 changed, 0 already there" in done.stdout
    assert "5 states of 2 conversations are in sessions" in done.stdout
    assert "redacted" in done.stderr
    assert stat.S_IMODE(Path("sessions").stat().st_mode) == 0o700
    assert Path("sessions/.gitignore").read_text() == "*\n"
    again = understudy("ingest", str(logs))
    assert "2 files are unchanged and were not read again" in again.stdout
    assert sorted(path.name for path in Path("sessions").iterdir()) == [".gitignore", "store.db"]


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_only_new_or_changed_states_are_written_to_the_store(jobs: str, tmp_path: Path):
    logs, store = tmp_path / "logs", tmp_path / "store"
    padding = PADDING if jobs == "2" else b""
    for name in ("a", "b", "c"):
        lay(logs, session(name, turns=3), directory=name, padding=padding)
    options = (logs, "--dir", store, "--jobs", jobs)
    assert figures(told(*options), "files", "unchanged", "new", "changed", "same") == (3, 0, 9, 0, 0)
    assert figures(told(*options), "files", "unchanged", "states", "new") == (3, 3, 0, 0)
    lay(logs, session("b", turns=5), directory="b", padding=padding)
    lay(logs, session("d"), directory="d")
    shutil.rmtree(logs / "c")
    assert figures(told(*options), "files", "unchanged", "new", "changed", "same") == (3, 1, 4, 1, 2)
    assert figures(told(*options), "unchanged") == (3,)
    # What a log that is gone held stays.
    assert [len(trace.turns) for trace in trace_store.traces(store)] == [3, 5, 3, 2]


def test_states_exported_from_the_store_equal_those_ingested_to_jsonl(tmp_path: Path):
    told(DATA, "--dir", tmp_path / "store")
    told(DATA, "--output", tmp_path / "ingested.jsonl")
    done = understudy("states", str(tmp_path / "store"), "--output", str(tmp_path / "s.jsonl"), "--unredacted")
    assert done.returncode == 0, done.stderr
    assert "not redacted" in done.stderr

    def by_id(path: Path) -> dict[str, dict[str, Any]]:
        # Where two logs hold turns of one conversation, the store's conversation names one of them.
        return {row["state_id"]: {**row, "source": None, "outcome": None} for row in rows(path)}

    assert by_id(tmp_path / "s.jsonl") == by_id(tmp_path / "ingested.jsonl")


def test_an_unchanged_log_in_an_archive_is_not_ingested_again(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "logs.zip", "w") as archive:
        archive.writestr("projects/p/a.jsonl", session("a").data())
    options = (tmp_path / "logs.zip", "--dir", tmp_path / "store")
    assert figures(told(*options), "new", "unchanged") == (2, 0)
    assert figures(told(*options), "new", "unchanged") == (0, 1)


def test_a_file_that_could_not_be_read_is_tried_again(tmp_path: Path):
    logs = lay(tmp_path, session("a"), directory="logs")
    (logs / "no.jsonl.gz").write_bytes(b"no gzip")
    options = (logs, "--format", "claude-code", "--dir", tmp_path / "store")
    assert told(*options)["skipped"]["unreadable_file"] == 1
    assert told(*options)["skipped"]["unreadable_file"] == 1


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_an_interrupted_ingest_stores_only_whole_traces_and_can_be_resumed(jobs: str, tmp_path: Path):
    logs, store = tmp_path / "logs", tmp_path / "store"
    lay(logs, session("a"), directory="a")
    told(logs, "--dir", store)
    for name in ("b", "c"):
        project = lay(logs, session(name, turns=6000), directory=name)
        with (project / f"{name}.jsonl").open("ab") as log:
            log.write(b'{"type":"queue-operation","pad":"' + b"x" * 8_000_000 + b'"}\n')
    command = [UNDERSTUDY, "ingest", logs, "--dir", store, "--jobs", jobs]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        wait_for(lambda: any(store.glob(".reading.*/part-*")), process)
        os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "run the same command again to continue" in stderr
    assert not list(store.glob(".reading.*"))
    assert {len(trace.turns) for trace in trace_store.traces(store)} <= {2, 6000}
    assert told(logs, "--dir", store)["unchanged"] >= 1
    assert sorted(len(trace.turns) for trace in trace_store.traces(store)) == [2, 6000, 6000]


# --- what is in a store --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("store")
    lay(root / "logs", session("a", turns=3, cwd="/home/jane/work"), session("b"), directory="p")
    told(root / "logs", "--dir", root / "store")
    return root / "store"


def test_states_are_shown_as_a_table(store: Path):
    done = understudy("states", str(store), "--where", "session_id = 'a'", "--limit", "2", env={"COLUMNS": "200"})
    assert done.returncode == 0, done.stderr
    assert "/home/jane/work" in done.stdout and "claude" in done.stdout
    assert done.stdout.splitlines()[-1] == "a sample of 2 of 3 states of 1 conversations"
    assert "tests" in understudy("states", "--columns").stdout.split()


def test_states_are_counted_by_a_column(store: Path):
    counted = understudy("states", str(store), "--by", "project", "--json")
    assert json.loads(counted.stdout)[0] == {"project": "/home/jane/work", "states": 3, "conversations": 1}
    done = understudy("states", str(store), "--by", "agent", "--where", "session_id = 'b'")
    assert done.returncode == 0 and done.stdout.splitlines()[-1].split() == ["claude-code", "2", "1"], done.stdout
    wrong = understudy("states", str(store), "--by", "modle")
    assert wrong.returncode == 2 and "unknown column 'modle'" in wrong.stderr and "model" in wrong.stderr
    both = understudy("states", str(store), "--by", "model", "--limit", "3")
    assert both.returncode == 2 and "leave out --output and --limit" in both.stderr


def test_user_names_are_redacted_in_printed_and_exported_states_by_default(store: Path, tmp_path: Path):
    env = {"XDG_DATA_HOME": str(tmp_path)}
    printed = understudy("states", str(store), "--json", "--limit", "2", env=env).stdout
    assert len([json.loads(line) for line in printed.splitlines()]) == 2
    assert "jane" not in printed
    assert "jane" in understudy("states", str(store), "--json", "--unredacted", env=env).stdout
    done = understudy("states", str(store), "--output", str(tmp_path / "s.parquet"), env=env)
    assert "5 states are in" in done.stdout, done.stderr
    assert "jane" not in json.dumps([row["project"] for row in rows_back(tmp_path / "s.parquet")])


def test_states_reports_unknown_columns_missing_stores_and_conflicting_outputs(store: Path, tmp_path: Path):
    wrong = understudy("states", str(store), "--where", "modle = 1")
    assert wrong.returncode == 2 and "no such column: modle" in wrong.stderr and "model" in wrong.stderr
    assert "none has no store (there is no such directory)" in understudy("states", str(tmp_path / "none")).stderr
    assert "has no store (store.db is missing)" in understudy("states", str(tmp_path)).stderr
    both = understudy("states", str(store), "--json", "--output", str(tmp_path / "x.jsonl"))
    assert "give only one of them" in both.stderr


def rows_back(path: Path) -> Iterator[dict[str, Any]]:
    """The states in a Parquet file as the lines of a JSON file would have them."""
    parquet: Any = importlib.import_module("pyarrow.parquet")
    with parquet.ParquetFile(path) as read:
        for batch in read.iter_batches(batch_size=64):
            for value in batch.to_pylist():
                value["messages"] = [_said(message) for message in value["messages"]]
                value["tools"] = None if value["tools"] is None else json.loads(value["tools"])
                yield value


def _said(value: dict[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": value["role"]}
    if value["content_parts"] is not None:
        message["content"] = json.loads(value["content_parts"])
    else:
        message["content"] = value["content"]
    for name in ("tool_calls", "tool_call_id"):
        if value[name] is not None:
            message[name] = value[name]
    if value["more"] is not None:
        message.update(json.loads(value["more"]))
    return message
