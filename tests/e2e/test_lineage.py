"""`understudy verify` and `understudy grade --regrade`: a run's lineage is proven, and gaps in it are named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from understudy.grade.verdict import GRADER
from understudy.store import Store
from understudy.tasks.records import dump

from support import calc_task, understudy

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("claude_code", "isolation")]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two solved tasks, with an export beside it."""
    home = tmp_path_factory.mktemp("lineage")
    dump([calc_task(number) for number in range(2)], home / "tasks.jsonl")
    options = ("--policy", "oracle", "--output-dir", home / "run", "--json")
    done = understudy("run", "embedded", "--tasks", home / "tasks.jsonl", *options)
    assert done.returncode == 0, done.stderr
    for kind in ("trl-sft", "trl-tokens", "openai"):
        done = understudy("export", kind, home / "run", "--output", home / kind, "--test-share", "0")
        assert done.returncode == 0, done.stderr
    return home


@pytest.fixture
def home(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "home"))


def verify(*arguments: str | Path, code: int = 0) -> dict[str, Any]:
    done = understudy("verify", *arguments, "--json")
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def forget_grader(run: Path) -> None:
    """Make the verdicts of a run such as 0.1 stored."""
    with Store.open(run, create=False) as store:
        for graded in store.outcomes.decisions():
            old = replace(graded.verdict, reward=0.0, grader="", task_digest="", patch_digest="")
            store.runs.replace_verdict(graded.attempt.id, old).result()


def test_each_row_leads_to_its_calls_weights_verdict_and_patch(home: Path):
    report = verify(home / "run")
    assert (report["rollouts"], report["failures"], report["skewed_tokens"]) == (2, 0, 0)
    assert report["rows"] >= 4, "the datasets in the run's directory"
    for kind in ("trl-sft", "trl-tokens"):
        rows = verify(home / kind, "--dir", home / "run")
        assert (rows["failures"], rows["rollouts"], rows["rows"] >= 2) == (0, 0, True)
    (problem, *_) = verify(home / "openai", "--dir", home / "run", code=1)["problems"]
    assert "has neither attempt_id nor example_id, expected one of them" in problem


def test_a_verdict_without_grader_and_a_reward_that_is_not_the_verdicts_are_named(home: Path):
    forget_grader(home / "run")
    report = verify(home / "run", code=1)
    assert report["failures"] >= 4
    text = "\n".join(report["problems"])
    assert "names no grader's version; grade it anew: understudy grade --regrade RUN" in text
    assert "reward is 1.0, the verdict's is 0.0; export again" in text


def test_changed_tokens_are_counted(home: Path):
    datasets = pytest.importorskip("datasets")
    saved = next((home / "run").glob("dataset-*"))
    rows = datasets.load_from_disk(saved).to_list()
    rows[0]["gold_completion_ids"][0] += 1
    rows[1]["prompt_ids"].append(7)
    (home / "rows.jsonl").write_text("".join(json.dumps(row, default=str) + "\n" for row in rows))
    report = verify(home / "rows.jsonl", "--dir", home / "run", code=1)
    assert report["skewed_tokens"] >= 2
    assert report["problems"][0].startswith(f"{home / 'rows.jsonl'}:1: 1 tokens are not those")


def test_a_dataset_outside_of_its_run_needs_the_run(home: Path):
    done = understudy("verify", home / "openai")
    assert done.returncode == 2
    assert "name the run that it was exported from with --dir" in done.stderr


def test_regrading_keeps_the_verdicts_before_and_makes_the_lineage_whole(home: Path):
    forget_grader(home / "run")
    done = understudy("grade", "--regrade", home / "run", "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["rollouts"], summary["solved"], summary["errors"]) == (2, 2, {})
    assert sorted(summary["changed"].values()) == [[0.0, 1.0]] * 2
    with Store.open(home / "run", create=False) as store:
        for graded in store.outcomes.decisions():
            verdict = graded.verdict
            assert (verdict.reward, verdict.grader) == (1.0, GRADER)
            assert [(each.reward, each.grader) for each in verdict.earlier] == [(1.0, GRADER), (0.0, "")]
    assert verify(home / "run")["failures"] == 0


def test_regrade_takes_no_predictions(home: Path):
    done = understudy("grade", "gold", "--regrade", home / "run")
    assert done.returncode == 2
    assert "leave out the predictions and --tasks" in done.stderr
