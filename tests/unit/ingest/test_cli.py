"""`understudy ingest`: logs of many formats in, one file of states out, whole or not at all."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from understudy.types import SCHEMA

from support import UNDERSTUDY, understudy, wait_for
from support.claude_log import Log

DATA = Path(__file__).parents[2] / "data" / "ingest"
KEYS = {
    "state_id", "trace_id", "session_id", "message_id", "messages", "student_action", "tools", "source_model",
    "source_family", "fidelity", "notes", "timestamp", "project", "branch", "role", "parent", "format", "source",
    "signals", "outcome", "tools_source", "tools_version", "tools_inferred", "schema",
}  # fmt: skip


def session(name: str, turns: int = 2, **envelope: Any) -> Log:
    log = Log(name, **envelope)
    log.user(f"do {name}")
    for turn in range(turns - 1):
        log.assistant(f"{name}-m{turn}", (f"{name}-t{turn}", "Bash"))
        log.result(f"{name}-t{turn}", "done")
    log.assistant(f"{name}-m{turns - 1}", "all done", stop="end_turn")
    return log


def lay(root: Path, *logs: Log, directory: str = "-home-dev-proj") -> Path:
    project = root / "projects" / directory
    project.mkdir(parents=True, exist_ok=True)
    for log in logs:
        (project / f"{log.envelope['sessionId']}.jsonl").write_bytes(log.data())
    return root / "projects"


def ingest(*arguments: str | Path, code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
    done = understudy("ingest", *map(str, arguments), env=env)
    assert done.returncode == code, done.stderr
    return done


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_formats_in_one_directory_each_become_states(tmp_path: Path):
    output = tmp_path / "states.jsonl"
    done = ingest(DATA, "--output", output)
    states = rows(output)
    assert all(row.keys() == KEYS and row["schema"] == SCHEMA for row in states)
    assert {"codex", "gemini", "atif", "aider", "swe-smith", "openhands"} <= {row["format"] for row in states}
    assert len({row["state_id"] for row in states}) == len(states)
    assert f"{len(states)} states of" in done.stdout
    assert "redacted" in done.stderr and "do not share it" in done.stderr
    assert stat.S_IMODE(output.stat().st_mode) == 0o600
    assert names(tmp_path) == [".states.jsonl.understudy", "states.jsonl"]


def test_a_row_has_the_context_and_the_action_of_a_state(tmp_path: Path):
    logs = lay(tmp_path, session("s1"))
    ingest(logs, "--output", tmp_path / "states.jsonl")
    first, second = rows(tmp_path / "states.jsonl")
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    assert first["student_action"]["tool_calls"][0]["id"] == "s1-t0"
    assert second["messages"][-1] == {"role": "tool", "tool_call_id": "s1-t0", "content": "done"}
    assert second["student_action"] == {
        "content": "all done", "thinking": None, "thinking_hidden": False, "tool_calls": [],
    }  # fmt: skip
    metadata = {
        key: second[key] for key in ("session_id", "message_id", "source_family", "fidelity", "role", "project")
    }
    assert metadata == {
        "session_id": "s1", "message_id": "s1-m1", "source_family": "claude", "fidelity": "exact", "role": "main",
        "project": "/home/dev/proj",
    }  # fmt: skip


def test_the_output_does_not_depend_on_the_number_of_processes(tmp_path: Path):
    for number in range(3):
        lay(tmp_path, session(f"s{number}"), directory=f"-p{number}")
    big = session("big", cwd="/" + "x" * 3_000_000)
    logs = lay(tmp_path, big, directory="-p0")
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    counts = [
        json.loads(ingest(logs, DATA, "--jobs", n, "--output", path, "--json").stdout)
        for n, path in (("1", one), ("2", two))
    ]
    assert one.read_bytes() == two.read_bytes()
    assert counts[0] | {"output": str(two)} == counts[1]
    hidden = [".one.jsonl.understudy", ".two.jsonl.understudy"]
    assert names(tmp_path) == [*hidden, "one.jsonl", "projects", "two.jsonl"]
    assert json.loads(ingest(logs, DATA, "--jobs", "2", "--dry-run", "--json").stdout)["states"] == len(rows(one))


def test_a_zip_and_gzip_are_read(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "logs.zip", "w") as archive:
        archive.writestr("projects/-p/s1.jsonl", session("s1").data())
    (tmp_path / "s2.jsonl.gz").write_bytes(gzip.compress(session("s2").data()))
    output = tmp_path / "out.jsonl"
    ingest(tmp_path, "--output", output)
    assert {row["session_id"] for row in rows(output)} == {"s1", "s2"}
    assert {row["source"] for row in rows(output)} == {
        str(tmp_path / "logs.zip!/projects/-p/s1.jsonl"),
        str(tmp_path / "s2.jsonl.gz"),
    }


def test_a_dry_run_counts_and_writes_nothing(tmp_path: Path):
    logs = lay(tmp_path, session("s1"), session("s2", turns=3))
    done = ingest(logs, "--dry-run", "--output", tmp_path / "states.jsonl", "--json")
    counts = json.loads(done.stdout)
    assert (counts["output"], counts["files"], counts["traces"], counts["states"]) == (None, 2, 2, 5)
    assert [counts[key] for key in ("formats", "families", "fidelities", "roles")] == [
        {"claude-code": 5}, {"claude": 5}, {"exact": 5}, {"main": 5},
    ]  # fmt: skip
    assert "redacted" not in done.stderr
    assert list(tmp_path.iterdir()) == [logs]
    assert "by model family: 5 claude" in ingest(logs, "--dry-run").stdout


@pytest.mark.parametrize(
    ("options", "remaining", "reason"),
    [
        (["--project", "other"], {"s2"}, {"other_project": 2}),
        (["--min-turns", "3"], {"s2"}, {"few_turns": 2}),
        (["--since", "2026-11-21T10:00:03Z"], {"s1", "s2"}, {"earlier": 2}),
        (["--since", "2027-01-01"], set(), {"earlier": 5}),
    ],
)
def test_filters_leave_out_states_and_count_them_by_reason(
    options: list[str], remaining: set[str], reason: dict[str, int], tmp_path: Path
):
    logs = lay(tmp_path, session("s1"), session("s2", turns=3, cwd="/home/dev/other"))
    output = tmp_path / "states.jsonl"
    done = ingest(logs, "--output", output, "--json", *options)
    assert json.loads(done.stdout)["left_out"] == reason
    assert {row["session_id"] for row in rows(output)} == remaining
    assert f"left out: {sum(reason.values())} states" in ingest(logs, "--dry-run", *options).stderr


def test_since_leaves_out_undated_states_and_counts_them():
    counts = json.loads(ingest(DATA / "swesmith.jsonl", "--since", "2020-01-01", "--dry-run", "--json").stdout)
    assert counts["states"] == 0
    assert counts["left_out"] == {"undated": 3}


def test_warmup_agents_are_left_out_unless_their_role_is_selected(tmp_path: Path):
    warm = Log("s1", isSidechain=True, agentId="a1")
    warm.user("Warmup")
    warm.assistant("w1", "ready", stop="end_turn")
    logs = lay(tmp_path, session("s1"))
    (logs / "-home-dev-proj" / "agent-a1.jsonl").write_bytes(warm.data())
    done = ingest(logs, "--dry-run")
    assert "left out: 1 states of warmup agents" in done.stderr and "--all-roles" in done.stderr
    assert "by role: 2 main" in done.stdout
    assert "by role: 2 main, 1 warmup" in ingest(logs, "--dry-run", "--all-roles").stdout


def test_a_format_can_be_chosen(tmp_path: Path):
    logs = lay(tmp_path, session("s1"))
    shutil.copy(DATA / "gemini.jsonl", logs / "gemini.jsonl")
    counts = json.loads(ingest(logs, "--format", "gemini", "--dry-run", "--json").stdout)
    assert counts["formats"].keys() == {"gemini"}
    assert counts["skipped"] == {"other_format": 1}
    odd = tmp_path / "terminal.log"
    shutil.copy(DATA / "claude_terminal.txt", odd)
    assert "by format: 5 claude-text" in ingest(odd, "--format", "claude-text", "--dry-run").stdout
    assert "give one of: " in ingest(logs, "--format", "nonsense", "--dry-run", code=2).stderr


def test_unreadable_files_are_counted_and_the_others_ingested(tmp_path: Path):
    logs = lay(tmp_path, session("s1"))
    project = logs / "-home-dev-proj"
    (project / "notes.txt").write_text("nothing of the kind")
    (project / "empty.jsonl").touch()
    (project / "bad.zip").write_bytes(b"PK no zip")
    (project / "torn.jsonl").write_bytes(session("torn").data() + b'{"type":"assist')
    whole = gzip.compress(b"".join(session(f"z{n}").data() for n in range(400)), 1)
    (project / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (project / "no.jsonl.gz").write_bytes(b"no gzip")
    output = tmp_path / "states.jsonl"
    for jobs in ("1", "2"):
        report = json.loads(ingest(logs, DATA, "--output", output, "--json", "--jobs", jobs).stdout)
        # What a zip gives before it breaks off is read, and nothing is written twice.
        assert {key: report["skipped"][key] for key in ("unknown_format", "empty_file", "bad_archive")} == {
            "unknown_format": 1, "empty_file": 1, "bad_archive": 1,
        }  # fmt: skip
        assert report["skipped"]["unreadable_file"] == 1
        assert report["losses"]["unreadable_rest"] == 1
        states = rows(output)
        assert len({(row["source"], row["state_id"]) for row in states}) == len(states) == report["states"]
        assert {"s1", "torn"} < {row["session_id"] for row in states}
        assert any(row["source"].endswith("cut.jsonl.gz") for row in states)
    done = ingest(logs, "--dry-run")
    assert "files not read: " in done.stderr and "1 unknown format" in done.stderr
    assert "lost in reading: " in done.stderr


def test_a_store_is_told_of_files_of_which_none_could_be_read(tmp_path: Path):
    wal = tmp_path / "opencode.db-wal"
    wal.write_bytes(b"\x37\x7f\x06\x82")
    done = ingest(wal, "--dir", tmp_path / "store")
    assert "files not read: 1 unreadable file" in done.stderr
    assert f"{wal}: its database {tmp_path / 'opencode.db'} is missing" in done.stderr


def test_a_name_that_is_no_utf8_is_written_all_the_same(tmp_path: Path):
    logs = lay(tmp_path, session("s1"))
    os.rename(  # noqa: PTH104
        logs / "-home-dev-proj" / "s1.jsonl", os.fsencode(logs / "-home-dev-proj") + b"/\xff.jsonl"
    )
    ingest(logs, "--output", tmp_path / "states.jsonl")
    assert len(rows(tmp_path / "states.jsonl")) == 2


def test_the_help_says_that_nothing_is_redacted():
    assert "NOTHING IS REDACTED" in " ".join(ingest("--help").stdout.split())


def test_the_default_is_the_users_claude_code_directory(tmp_path: Path):
    lay(tmp_path / "config", session("s1"))
    done = ingest("--dry-run", CLAUDE_CONFIG_DIR=str(tmp_path / "config"))
    assert f"reading {tmp_path}/config/projects" in done.stderr
    assert done.stdout.startswith("2 states")
    lay(tmp_path / ".claude", session("s2", turns=4))
    assert ingest("--dry-run", HOME=str(tmp_path), CLAUDE_CONFIG_DIR="").stdout.startswith("4 states")
    lost = ingest("--dry-run", CLAUDE_CONFIG_DIR=str(tmp_path / "none"), code=2)
    assert "does not exist; give the PATH of logs" in lost.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["logs", "--output", "out.jsonl", "--dir", "store"], "give only one of them"),
        (["logs", "--redact"], "--redact needs --output FILE"),
        (["logs", "--output", "out.jsonl", "--since", "yesterday"], "invalid date 'yesterday'"),
        (["logs", "--output", "none/out.jsonl"], "cannot write in"),
        (["logs", "--output", "logs"], "not a regular file"),
        (["logs", "--output", "logs/s1.jsonl"], "one of the logs to read"),
        (["other", "--output", "out.jsonl"], "no logs were found in other (1 unknown format)"),
        (["none", "--output", "out.jsonl"], "cannot read none"),
    ],
)
def test_invalid_arguments_are_refused_and_no_file_is_changed(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    for path, text in (("logs/s1.jsonl", session("s1").data()), ("other/a.txt", b"text")):
        Path(path).parent.mkdir()
        Path(path).write_bytes(text)
    assert message in ingest(*arguments, code=2).stderr
    assert sorted(map(str, Path().rglob("*"))) == ["logs", "logs/s1.jsonl", "other", "other/a.txt"]
    assert Path("logs/s1.jsonl").read_bytes() == session("s1").data()


def written(root: Path) -> int:
    """The bytes in the temporary files of the command; it removes them as it goes on."""
    sizes: list[int] = []
    for path in root.glob(".states.jsonl.*/[wp]*"):
        with suppress(FileNotFoundError):
            sizes.append(path.stat().st_size)
    return sum(sizes)


def stopped(tmp_path: Path, *options: str) -> subprocess.Popen[str]:
    """The command, which has begun to write, and then was stopped with all its processes (SIGSTOP).

    So it cannot finish before it gets the signal that a test sends, however busy the machine is.
    """
    for which in ("a", "b"):
        # Each of many turns is written with all before it. The padding has the two be read apart.
        logs = lay(tmp_path, session(which, turns=3000), directory=f"-{which}")
        with (logs / f"-{which}" / f"{which}.jsonl").open("ab") as log:
            log.write(b'{"type":"queue-operation","pad":"' + b"x" * 8_000_000 + b'"}\n')
    output = tmp_path / "states.jsonl"
    output.write_text("before\n")
    command = [UNDERSTUDY, "ingest", logs, "--output", output, *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_for(lambda: written(tmp_path) > 0, process, seconds=120)
    os.killpg(process.pid, signal.SIGSTOP)
    return process


def gone(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def wait_until_gone(group: int) -> None:
    """What the standard library starts beside the readers goes a moment later than the command."""
    until = time.monotonic() + 60
    while not gone(group):
        assert time.monotonic() < until, "a process is left"
        time.sleep(0.01)


@pytest.mark.parametrize("jobs", ["1", "2"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_ingest_leaves_the_earlier_output(jobs: str, number: signal.Signals, tmp_path: Path):
    with stopped(tmp_path, "--jobs", jobs) as process:
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does
        else:
            process.send_signal(number)
        os.killpg(process.pid, signal.SIGCONT)
        _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130
    *progress, last = stderr.splitlines()
    assert last == "understudy: interrupted; nothing was written"
    # On a busy machine ten seconds may have passed, and the progress is printed.
    assert all(line.startswith(("read ", "looking for logs")) for line in progress)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["projects", "states.jsonl"]
    assert (tmp_path / "states.jsonl").read_text() == "before\n"
    wait_until_gone(process.pid)


def test_temporary_files_of_a_killed_ingest_are_removed_by_the_next(tmp_path: Path):
    with stopped(tmp_path, "--jobs", "2") as process:
        process.kill()
        os.killpg(process.pid, signal.SIGCONT)
        process.communicate(timeout=120)
    assert (tmp_path / "states.jsonl").read_text() == "before\n"
    wait_until_gone(process.pid)
    assert list(tmp_path.glob(".states.jsonl.*"))
    ingest(DATA / "gemini.jsonl", "--output", tmp_path / "states.jsonl")
    assert names(tmp_path) == [".states.jsonl.understudy", "projects", "states.jsonl"]
    assert rows(tmp_path / "states.jsonl")


def test_a_failed_write_is_reported_and_leaves_the_earlier_output(tmp_path: Path):
    output = tmp_path / "states.jsonl"
    output.write_text("before\n")
    logs = lay(tmp_path, session("s1", turns=300))
    limited = ["bash", "-c", 'ulimit -f 64; exec "$@"', "bash", UNDERSTUDY, "ingest", logs, "-o", output]
    done = subprocess.run(limited, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert "cannot be written: File too large" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["projects", "states.jsonl"]
    assert output.read_text() == "before\n"


def test_the_errors_of_damaged_files_are_printed(tmp_path: Path):
    logs = lay(tmp_path, session("s1"))
    (logs / "a").mkdir()
    (logs / "a" / "opencode.db").write_bytes(b"SQLite format 3\0" + b"\xff" * 4000)
    (logs / "bad.zip").write_bytes(b"PK no zip")
    with zipfile.ZipFile(logs / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb.jsonl", b"\0" * 200_000_000)
    (logs / "no.jsonl.gz").write_bytes(b"no gzip")
    expected = {
        "opencode.db": "cannot be read as a database of OpenCode",
        "bad.zip": "cannot be read as a zip archive",
        "bomb.jsonl": "unpacks to far more bytes than expected",
        "no.jsonl.gz": "Not a gzipped file",
    }
    for options in (("--dry-run",), ("--dir", tmp_path / "store"), ("--verify",)):
        printed = [line for line in ingest(logs, *options).stderr.splitlines() if line.startswith("error: ")]
        assert len(printed) == len(expected)
        for name, problem in expected.items():
            (line,) = (line for line in printed if name in line)
            assert problem in line and len(line) < 600
        listed = json.loads(ingest(logs, *options, "--json").stdout)["errors"]
        assert sorted(f"error: {text}" for text in listed) == sorted(printed)


def test_of_very_many_damaged_files_the_first_errors_are_printed(tmp_path: Path):
    for number in range(50):
        (tmp_path / f"{number:02d}{'x' * 200}.zip").write_bytes(b"PK no zip")
    done = ingest(tmp_path, "--dry-run", code=2)
    assert "50 bad archive" in done.stderr
    printed = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert [name in line for name, line in zip(("00x", "01x"), printed, strict=False)] == [True, True]
    assert len([line for line in printed if "zip archive" in line]) == 20


def test_counting_states_imports_no_store() -> None:
    """The store's libraries take longer to import than many logs take to count."""
    code = "import sys; from understudy.ingest import found_logs; assert 'sqlalchemy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
