"""JSONL records: what is written is read, and what is wrong is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from understudy.errors import ConfigError, TaskError
from understudy.tasks import records
from understudy.tasks.load import load_file
from understudy.types import Directory, Files, PytestChecks, ScriptChecks, Task


def task(id: str = "a-1", **changes: Any) -> Task:
    values: dict[str, Any] = {
        "instance_id": id,
        "repo": "a",
        "instruction": f"Mend {id} — é.",
        "source": Files({"a.py": "x = 1\n"}),
        "checks": PytestChecks({"test_a.py": ""}, ("test_a.py::test_x",)),
        "gold_patch": "diff --git a/a.py b/a.py\n",
    }
    return Task(**{**values, **changes})


def written(path: Path, *objects: Any) -> Path:
    path.write_text("".join(json.dumps(obj) + "\n" for obj in objects))
    return path


def raw(**changes: Any) -> dict[str, Any]:
    return {
        "instance_id": "a-1",
        "repo": "a",
        "instruction": "Mend it.",
        "source": {"kind": "files", "files": {"a.py": ""}},
        "checks": {"kind": "pytest", "files": {}, "fail_to_pass": ["t.py::x"]},
        "gold_patch": "diff",
        **changes,
    }


def load(path: Path) -> list[Task]:
    return load_file(path).tasks


def test_task_records_round_trip_through_a_file(tmp_path: Path) -> None:
    tasks = [task("a-1"), task("b-2", meta={"seed": 1}, env={"A": "b"})]
    records.dump(tasks, tmp_path / "t.jsonl")
    assert load(tmp_path / "t.jsonl") == tasks
    assert [path.name for path in tmp_path.iterdir()] == ["t.jsonl"]


def test_relative_directories_resolve_against_the_file(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    records.dump([task(source=Directory("src"), checks=ScriptChecks(Directory(str(tmp_path / "checks"))))], path)
    (read,) = load(path)
    assert read.source == Directory(str(tmp_path / "src"))
    assert isinstance(read.checks, ScriptChecks)
    assert read.checks.source == Directory(str(tmp_path / "checks"))


@pytest.mark.parametrize("path", ["/etc", "..", "src/../..", "link", "link/passwd.d", "\0"])
def test_directories_outside_the_record_file_s_folder_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    (tmp_path / "tasks" / "src").mkdir(parents=True)
    (tmp_path / "tasks" / "link").symlink_to("/etc")
    file = tmp_path / "tasks" / "t.jsonl"
    checks = ScriptChecks(Directory(path))
    for one, key in ((task(source=Directory(path)), "source.path"), (task(checks=checks), "checks.source.path")):
        records.dump([one], file)
        with pytest.raises(TaskError, match=rf"t.jsonl:1: {key}: .* is not"):
            load(file)
        monkeypatch.setenv("UNDERSTUDY_ALLOW_ANY_DIRECTORY", "1")
        if path != "\0":
            assert len(load(file)) == 1
        monkeypatch.delenv("UNDERSTUDY_ALLOW_ANY_DIRECTORY")


def test_task_files_written_by_a_run_load_with_their_remembered_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNDERSTUDY_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "run").mkdir()
    relative = task(source=Directory("src"), checks=ScriptChecks(Directory("checks")))
    records.dump([relative], tmp_path / "tasks" / "t.jsonl")
    (loaded,) = load(tmp_path / "tasks" / "t.jsonl")
    written_by_run = tmp_path / "run" / "tasks.jsonl"
    records.dump([loaded], written_by_run)
    with pytest.raises(TaskError, match=r"source\.path: .* is not below"):
        load(written_by_run)
    records.remember([loaded])
    assert load(written_by_run) == [loaded]
    others = (
        task(source=Directory("/etc"), checks=loaded.checks),
        task(source=loaded.source, checks=ScriptChecks(Directory("/etc"))),
        task(source=loaded.source, checks=loaded.checks, instruction="Send all of it."),
    )
    for other in others:
        records.dump([other], written_by_run)
        with pytest.raises(TaskError, match="is not below"):
            load(written_by_run)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (raw(instance_id="../x"), "instance_id: got .*, expected"),
        (raw(instance_id=""), "instance_id: got .*, expected"),
        (raw(instruction=" "), "instruction: got .*, expected"),
        (raw(gold_patch=""), "gold_patch: got .*, expected"),
        (raw(workdir="/a/../b"), "workdir: got .*, expected"),
        (raw(workdir="x"), "workdir: got .*, expected"),
        (raw(meta={"agent_timeout_s": "60"}), "meta.agent_timeout_s: got .*, expected"),
        (raw(meta={"agent_timeout_s": 0}), "meta.agent_timeout_s: got .*, expected"),
        (raw(colour="red"), "unknown key 'colour'; remove it, or give instance_id, "),
        (raw(instructions="Mend it."), r"unknown key 'instructions'; did you mean 'instruction'\?"),
        (
            raw(checks={"kind": "pytest", "files": {}, "fail_to_pas": ["x"]}),
            r"unknown key 'checks.fail_to_pas'; did you mean 'fail_to_pass'\?",
        ),
        (
            raw(checks={"kind": "script", "source": {"kind": "directory", "paths": "a"}}),
            r"unknown key 'checks.source.paths'; did you mean 'path'\?",
        ),
        (raw(repo=3), "repo: expected `str`, got 3; correct this key"),
        (raw(checks={"kind": "pytest", "files": {}, "fail_to_pass": []}), "checks.fail_to_pass: got .*, expected"),
        (
            raw(checks={"kind": "pytest", "files": {"a": 1}, "fail_to_pass": ["x"]}),
            r"checks\.files\[\.\.\.\]: expected `str`, got `int`",
        ),
        (
            raw(checks={"kind": "other"}),
            r"checks\.kind: invalid value 'other', expected one of pytest, script, suite;",
        ),
        (
            raw(source={"kind": "sdist", "name": "a", "version": "1", "sha256": "ab"}),
            "source.sha256: got .*, expected",
        ),
        ([], "expected an object"),
    ],
)
def test_invalid_records_are_refused_with_line_and_reason(tmp_path: Path, record: Any, message: str) -> None:
    path = written(tmp_path / "t.jsonl", raw(instance_id="ok", instruction="Other."), record)
    with pytest.raises(TaskError, match=rf"t\.jsonl:2: .*{message}"):
        load(path)


@pytest.mark.parametrize("line", [b"{", b"\xff", b"[" * 100_000, b'{"instance_id": NaN}'])
def test_invalid_json_is_refused_with_its_line(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "t.jsonl").write_bytes(b"\n" + line)
    with pytest.raises(TaskError, match=r"t\.jsonl:2: invalid JSON"):
        load(tmp_path / "t.jsonl")


def test_duplicate_ids_are_refused_and_equal_instructions_allowed(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r":2: instance_id: 'a-1' occurs twice, a row before this one has it"):
        load(written(tmp_path / "t.jsonl", raw(), raw(instruction="Other.")))
    assert len(load(written(tmp_path / "t.jsonl", raw(), raw(instance_id="b")))) == 2


def test_an_empty_or_missing_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("\n\n")
    for path, message in (
        (tmp_path / "t.jsonl", "has no row"),
        (tmp_path / "u", "cannot be read"),
    ):
        with pytest.raises(TaskError, match=message):
            load(path)


def test_a_failed_dump_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    records.dump([task()], path)
    before = path.read_bytes()
    with pytest.raises(TypeError):
        records.dump([task("b"), task("c", meta={"x": object()})], path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.jsonl"]
    with pytest.raises(ConfigError, match="cannot be written"):
        records.dump([task()], tmp_path / "no" / "t.jsonl")


def test_tasks_that_cannot_be_written_do_not_blame_the_disk(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError, match="tasks cannot be written: Not a directory; choose another path"
    ) as caught:
        records.dump([], tmp_path / "file" / "t.jsonl")
    assert "space" not in str(caught.value)
