"""`understudy tasks make functions`: small tasks of our own making, validated like any others."""

from __future__ import annotations

import json
from pathlib import Path

from understudy.tasks.generate.functions import make_functions
from understudy.tasks.load import load_file

from support import understudy


def test_tasks_make_functions_uses_the_requested_split(tmp_path: Path):
    done = understudy("tasks", "make", "functions", "-n", "2", "--seed", "5", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["path"] == "tasks/functions-train-2-5.jsonl"
    assert load_file(tmp_path / report["path"]).tasks == make_functions(2, 5, "train")
    way = ("tasks", "make", "functions", "-n", "2", "--seed", "5", "--split", "held-out")
    done = understudy(*way, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 of 2 tasks validated" in done.stderr
    assert "next: understudy run --tasks tasks/functions-held-out-2-5.jsonl" in done.stdout
    held_out = load_file(tmp_path / "tasks/functions-held-out-2-5.jsonl").tasks
    assert held_out == make_functions(2, 5, "held-out")
    assert not {task.instance_id for task in held_out} & set(report["tasks"])


def test_only_functions_have_splits(tmp_path: Path):
    done = understudy("tasks", "make", "toolz", "--split", "held-out", cwd=tmp_path)
    assert done.returncode == 2
    assert "understudy tasks make functions" in done.stderr
    done = understudy("tasks", "make", "functions", "--split", "some", cwd=tmp_path)
    assert done.returncode == 2
    assert "held-out" in done.stderr
    done = understudy("tasks", "make", "functons", cwd=tmp_path)
    assert done.returncode == 2
    assert "functions" in done.stderr
    assert not (tmp_path / "tasks").exists()
