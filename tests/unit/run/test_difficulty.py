"""Which tasks are kept by how often the rollouts of runs solved them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec import structs

from understudy.errors import ConfigError, TaskError
from understudy.run.difficulty import (
    ALWAYS_SOLVED,
    NEVER_SOLVED,
    NOT_GRADED,
    TOO_EASY,
    TOO_HARD,
    SolveRates,
    parse_solve_rates,
    select,
    tried_tasks,
)
from understudy.store import Store
from understudy.tasks.load import load_file
from understudy.types import Verdict

from support import calc_task, understudy


def put_run(directory: Path, run_id: str, rewards: Mapping[int, str]) -> None:
    """A run whose rollouts of each calc task ended as given: 1 solved, 0 not, x failed without a verdict."""
    with Store.open(directory) as store:
        store.runs.create(run_id, {"backend": "embedded"}).result()
        store.runs.add_tasks(run_id, [calc_task(number) for number in rewards]).result()
        ids = {
            (f"{run_id}-{number}-{at}", f"calc-{number}", at): end
            for number, ends in rewards.items()
            for at, end in enumerate(ends)
        }
        store.runs.create_rollouts(run_id, list(ids)).result()
        for (name, _, _), end in ids.items():
            attempt = store.runs.start_attempt(name).result()
            store.runs.mark_running(attempt.id).result()
            verdict = None if end == "x" else Verdict(reward=float(end), reason="x", tests={})
            ended = "failed" if verdict is None else "succeeded"
            store.runs.finish_attempt(attempt.id, ended, ended, patch=b"+x\n", verdict=verdict).result()


def test_only_tasks_that_are_sometimes_solved_are_kept(tmp_path: Path):
    put_run(tmp_path, "run1", {0: "0000", 1: "0100", 2: "1111", 3: "xx", 4: "1x1", 5: "11x0"})
    tried = tried_tasks([tmp_path])
    chosen = select(tried)
    assert [task.instance_id for task in chosen.kept] == ["calc-1", "calc-5"]
    assert chosen.kept[0] == calc_task(1)
    assert chosen.dropped == {
        "calc-0": NEVER_SOLVED,
        "calc-2": ALWAYS_SOLVED,
        "calc-3": NOT_GRADED,
        "calc-4": ALWAYS_SOLVED,
    }
    assert chosen.counts == {ALWAYS_SOLVED: 2, NEVER_SOLVED: 1, NOT_GRADED: 1}
    chosen = select(tried, SolveRates(0.0, 0.25))
    assert [task.instance_id for task in chosen.kept] == ["calc-0", "calc-1"]
    assert select(tried, SolveRates(0.5, 0.9)).counts == {TOO_HARD: 2, TOO_EASY: 2, NOT_GRADED: 1}


def test_rollouts_of_several_runs_are_counted_together(tmp_path: Path):
    put_run(tmp_path / "first", "run1", {0: "00", 1: "11"})
    put_run(tmp_path / "second", "run2", {0: "01"})
    put_run(tmp_path / "second", "run3", {1: "11"})
    tried = tried_tasks([tmp_path / "first", tmp_path / "second"])
    assert [(each.task.instance_id, each.solved, each.graded) for each in tried] == [
        ("calc-0", 1, 4),
        ("calc-1", 4, 4),
    ]
    assert [(each.solved, each.graded) for each in tried_tasks([tmp_path / "second"], "run2")] == [(1, 2)]


def test_another_task_of_the_same_id_is_refused(tmp_path: Path):
    put_run(tmp_path / "first", "run1", {0: "0"})
    with Store.open(tmp_path / "second") as store:
        store.runs.create("run2", {}).result()
        store.runs.add_tasks("run2", [structs.replace(calc_task(0), instruction="Another.")]).result()
        store.runs.create_rollouts("run2", [("r", "calc-0", 0)]).result()
    with pytest.raises(TaskError, match="calc-0 differs from the task of the same id"):
        tried_tasks([tmp_path / "first", tmp_path / "second"])


@pytest.mark.parametrize("text", ["0.1..0.9", "0..1", ".5..0.5", "0.0..1.0"])
def test_bounds_are_read(text: str):
    low, _, high = text.partition("..")
    assert parse_solve_rates("--solve-rate", text) == SolveRates(float(low), float(high))


@pytest.mark.parametrize("text", ["", "0.5", "0.9..0.1", "-1..1", "0..2", "a..b", "0..1..1", "1e-1..1", "0.1-0.9"])
def test_bounds_that_are_none_are_refused(text: str):
    with pytest.raises(ConfigError, match=r"give LOW\.\.HIGH"):
        parse_solve_rates("--solve-rate", text)


def test_the_command_writes_the_kept_tasks_and_counts_the_others(tmp_path: Path):
    put_run(tmp_path / "run", "run1", {0: "00", 1: "01", 2: "11"})
    kept = tmp_path / "new" / "kept.jsonl"
    done = understudy("tasks", "filter", tmp_path / "run", "-o", kept)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "1 tasks dropped: never solved",
        "1 tasks dropped: always solved",
        f"1 tasks in {kept}",
        f"next: understudy run --tasks {kept}",
    ]
    assert load_file(kept).tasks == [calc_task(1)]
    done = understudy("tasks", "filter", tmp_path / "run", "-o", kept, "--solve-rate", "0.5..1", "--json")
    report = json.loads(done.stdout)
    assert report["tasks"] == ["calc-1", "calc-2"] and report["dropped"] == {"calc-0": TOO_HARD}
    assert report["solve_rates"]["calc-2"] == {"solved": 2, "graded": 2}
    before = kept.read_bytes()
    done = understudy("tasks", "filter", tmp_path / "run", "-o", kept, "--solve-rate", "0.2..0.4")
    assert (
        done.returncode == 2 and "none of 3 tasks is left" in done.stderr and "2 solve rate above" in done.stderr
    )
    assert kept.read_bytes() == before
    done = understudy("tasks", "filter", tmp_path / "nothing", "-o", kept)
    assert done.returncode == 2 and "nothing" in done.stderr
