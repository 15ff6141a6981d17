"""`understudy tasks make`: small functions, tasks from a history that is no use, and probes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from understudy.store import Store
from understudy.tasks.generate.functions import make_functions
from understudy.tasks.load import load_file
from understudy.tasks.patch import MAX_PATCH_BYTES

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


@pytest.mark.usefixtures("isolation")
def test_a_history_whose_tasks_all_fail_validation_is_an_error_and_leaves_no_file(tmp_path: Path):
    repository = tmp_path / "calc"
    # A change that is longer than a patch may be.
    long = f"NAME = '{'x' * MAX_PATCH_BYTES}'\n"
    test = "from calc import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n"
    wrong, right = (f"def add(a, b):\n    return a {sign} b\n" for sign in "-+")
    for files in ({"calc.py": wrong}, {"calc.py": right + long, "tests/test_calc.py": test}):
        for name, text in files.items():
            (repository / name).parent.mkdir(parents=True, exist_ok=True)
            (repository / name).write_text(text)
        for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "Change"]):
            identity = ("-c", "user.name=A", "-c", "user.email=a@example.org")
            subprocess.run(["git", *identity, *words], cwd=repository, check=True)
    made = understudy("tasks", "make", "--repo", repository, "-o", "out/made.jsonl", cwd=tmp_path)
    assert made.returncode == 2, made.stdout
    assert "1 generated tasks did not pass validation" in made.stderr and "--requirements" in made.stderr
    assert not list((tmp_path / "out").glob("*"))


PROBE_CONFIG = """
[run]
agent = ["shell"]
agent_command = "true"
"""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--probe", "2"], "--probe needs the model to probe with"),
        (["--model", "tiny"], "only apply with --probe"),
        (["--probe", "1", "--model", "tiny"], "probe"),
        (["--probe", "2", "--model", "no-such-model"], "no-such-model"),
        (["--probe", "2", "--config", "probe.toml"], "store and engine do not apply"),
    ],
)
def test_a_probe_that_cannot_run_is_refused_before_tasks_are_made(
    tmp_path: Path, options: list[str], message: str
):
    (tmp_path / "probe.toml").write_text(PROBE_CONFIG + 'engine = "workers"\n')
    done = understudy("tasks", "make", "functions", "-n", "2", *options, cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr
    assert not (tmp_path / "tasks").exists()


@pytest.mark.usefixtures("isolation")
def test_tasks_that_the_model_never_solves_are_dropped_and_the_probe_is_not_repeated(tmp_path: Path):
    (tmp_path / "probe.toml").write_text(PROBE_CONFIG)
    way = ("tasks", "make", "functions", "-n", "2", "--probe", "2", "--config", "probe.toml", "-o", "made.jsonl")
    for _ in range(2):
        done = understudy(*way, cwd=tmp_path)
        assert done.returncode == 2 and "none of 2 tasks is left (2 never solved)" in done.stderr, done.stderr
        assert not (tmp_path / "made.jsonl").exists()
        with Store.open(tmp_path / "made-probe", create=False) as store:
            (run,) = store.runs.all()
            assert [each.attempts for each in store.outcomes.of_run(run.id)] == [1, 1, 1, 1]
    done = understudy("tasks", "filter", "made-probe", "--solve-rate", "0..0", "-o", "made.jsonl", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert load_file(tmp_path / "made.jsonl").tasks == load_file(tmp_path / "made-all.jsonl").tasks


@pytest.mark.services
@pytest.mark.usefixtures("claude_code", "isolation")
def test_a_probe_through_claude_code_keeps_what_is_sometimes_solved(tmp_path: Path):
    (tmp_path / "probe.toml").write_text('[run]\npolicy = "flaky"\npolicy_arg = ["p=0.5"]\n')
    way = ("tasks", "make", "functions", "-n", "4", "--probe", "3", "--config", "probe.toml", "-o", "made.jsonl")
    done = understudy(*way, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    rates = report["solve_rates"]
    assert {name: rates[name]["graded"] for name in rates} == dict.fromkeys(rates, 3) and len(rates) == 4
    sometimes = [name for name in rates if 0 < rates[name]["solved"] < 3]
    assert report["tasks"] == sometimes == [task.instance_id for task in load_file(tmp_path / "made.jsonl").tasks]
    assert report["dropped"].keys() == rates.keys() - set(sometimes)
