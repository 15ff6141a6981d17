"""From directories to figures: runs, loops and trainers, whole, unfinished, damaged, with stores that are gone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from understudy.errors import ConfigError, StoreError
from understudy.report.formatting import describe_judgement, sentence
from understudy.report.read import read_figures
from understudy.store import Store
from understudy.types import PolicySpan
from understudy.util.statistics import wilson

from support.report import End, put_loop, put_run, solved

WORSE = solved({f"t{n}": (n < 2, 1) for n in range(20)})
BETTER = solved({f"t{n}": (n < 16, 1) for n in range(20)})


def test_reasons_count_together_whether_0_1_worded_them_or_we_do(tmp_path: Path):
    texts = ("2 of 3 tests to mend still fail: t", "2 of 3 tests to fix still fail: t")
    ends = {"a": [End(0.0, reason=reason) for reason in texts]}
    assert read_figures([put_run(tmp_path / "run", ends)]).unsolved == {texts[1]: 2}


def test_a_run(tmp_path: Path):
    ends = {
        "a": [End(1.0, turns=3), End(0.0, turns=1)],
        "b": [End(0.0, reason="no patch"), End(1.0, suspicious=True)],
        "c": [End(None, boundary="backend"), End(None)],
    }
    figures = read_figures([put_run(tmp_path / "run", ends, version="v1")])
    (point,) = figures.points
    assert (figures.kind, figures.title, figures.headline) == ("run", "run", None)
    assert (point.solved, point.unsolved, point.suspicious, point.suspicious_solved) == (2, 2, 1, 1)
    assert (point.failed, point.pending, point.version) == (1, 1, "v1")
    assert point.solve_rate == wilson(2, 4) and point.reward is not None
    assert (point.reward.low, point.reward.high) == (point.solve_rate.low, point.solve_rate.high)
    assert point.turns is not None and point.turns.estimate == 2.0
    assert point.sampled is not None and point.sampled.estimate == (10 + 11 + 12 + 10 + 21 + 21) / 4
    assert (point.calls, point.prompt_tokens) == (10, 1000)
    assert figures.unsolved == {"test_shift fails": 1, "no patch": 1}
    assert [(row.task_id, row.tried) for row in figures.tasks] == [("a", ((1, 2),)), ("b", ((1, 2),))]
    (row,) = figures.boundaries
    assert (row.boundary, row.attempts, row.given_up, row.example) == ("backend", 1, 1, "the backend broke")
    assert figures.about["model"] == "tiny" and figures.about["sampling"] == "temperature 0.7"
    assert describe_judgement(figures) == ("50.0\u00a0% solved", "open")


def test_a_fault_that_was_mended_by_another_attempt_is_counted_and_is_no_failure(tmp_path: Path):
    figures = read_figures([put_run(tmp_path, {"a": [End(1.0, retried=True)]})])
    assert figures.points[0].failed == 0 and figures.points[0].solved == 1
    assert [(row.boundary, row.attempts, row.given_up) for row in figures.boundaries] == [("sandbox", 1, 0)]


def test_versions_with_calls_that_met_an_update(tmp_path: Path):
    both = (PolicySpan("v1", 0, 4), PolicySpan("v2", 4, 10))
    ends = {"a": [End(1.0, turns=2, version="v1"), End(1.0, turns=1, version="v2", spans=both)]}
    rows = read_figures([put_run(tmp_path, ends)]).versions
    assert [(row.version, row.calls, row.mixed, row.completion_tokens) for row in rows] == [
        ("v1", 2, 0, 21),
        ("v2", 1, 1, 10),
    ]


def test_rewards_that_are_no_zeros_and_ones(tmp_path: Path):
    figures = read_figures([put_run(tmp_path, {"a": [End(0.25), End(0.75), End(1.0)]})])
    (point,) = figures.points
    assert point.solved == 1 and point.solve_rate == wilson(1, 3)
    assert point.reward is not None and point.reward.estimate == pytest.approx(2 / 3)


def test_runs_are_compared_first_with_last(tmp_path: Path):
    directories = [
        put_run(tmp_path / name, ends) for name, ends in (("old", WORSE), ("mid", BETTER), ("new", BETTER))
    ]
    figures = read_figures(directories)
    assert figures.title == "old → new" and [point.label for point in figures.points] == ["old", "mid", "new"]
    assert figures.headline is not None
    difference = figures.headline.difference
    assert (difference.value, difference.judgement, difference.common_tasks) == (pytest.approx(0.7), "better", 20)
    assert describe_judgement(figures) == ("Better, beyond chance", "better")
    assert "80.0\u00a0% of rollouts solved (16 of 20, new), 10.0\u00a0% before (2 of 20, old)" in sentence(figures)
    assert figures.tasks[0].tried == ((0, 1), (1, 1), (1, 1))
    assert describe_judgement(read_figures(directories[::-1])) == ("Worse, beyond chance", "worse")
    assert describe_judgement(read_figures(directories[1:])) == (
        "No difference beyond chance",
        "open",
    )
    assert [point.label for point in read_figures(directories[:2], ["x", "y"]).points] == ["x", "y"]
    few = [put_run(tmp_path / f"few{n}", solved({"a": (9 * n, 9), "b": (9 * n, 9)})) for n in range(2)]
    assert describe_judgement(read_figures(few)) == ("Too few tasks to tell", "open")


def test_a_gain_of_suspicious_patches_is_not_called_better(tmp_path: Path):
    cheated = solved({f"t{n}": (n < 16, 1) for n in range(20)}, suspicious=True)
    figures = read_figures([put_run(tmp_path / "a", WORSE), put_run(tmp_path / "b", cheated)])
    assert figures.headline is not None
    assert figures.headline.difference.judgement == "better" and figures.headline.strict.judgement == "open"
    assert describe_judgement(figures)[1] == "worse" and "suspicious" in describe_judgement(figures)[0]


def test_a_loop(tmp_path: Path):
    step = solved({"x": (2, 4), "y": (0, 4)})
    metrics = [{"step": 1, "version": "step-0001", "updated": True, "loss": 0.5, "mismatch_mean": 1e-5}]
    figures = read_figures([put_loop(tmp_path / "loop", [WORSE, BETTER], [step], metrics=metrics)])
    assert figures.kind == "loop" and describe_judgement(figures)[1] == "better"
    assert [(point.step, point.version, point.solved) for point in figures.points] == [
        (0, "step-0000", 2),
        (1, "step-0001", 16),
    ]
    assert [(point.step, point.version, point.graded) for point in figures.collected] == [(1, "step-0000", 8)]
    assert figures.training[0].values == {"loss": 0.5, "mismatch_mean": 1e-5}
    assert [row.version for row in figures.versions] == ["step-0000", "step-0001"]
    assert figures.about["temperature"] == "0.7" and figures.about["learning rate"] == "0.0001"
    assert figures.notes == ()


def test_a_loop_that_has_not_begun_and_one_that_goes_on(tmp_path: Path):
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "loop.json").write_text(put_loop(tmp_path / "other", []).joinpath("loop.json").read_text())
    figures = read_figures([empty])
    assert figures.points == () and "no evaluation" in figures.notes[0]
    assert describe_judgement(figures) == ("Nothing is graded yet", "open")
    going = put_loop(tmp_path / "going", [WORSE], [], planned=3)
    put_run(going / "evaluations" / "step-0001", {"a": [End(1.0), End(None)]})
    figures = read_figures([going])
    assert len(figures.points) == 1 and figures.headline is None
    assert describe_judgement(figures)[0] == "Nothing to compare with yet"
    assert any(
        "step-0001 is not shown: 1 rollouts are graded, 1 solved, 1 pending" in note for note in figures.notes
    )
    assert any("0 of 3 steps are over" in note for note in figures.notes)


def test_where_a_store_is_gone_the_states_word_counts_and_that_is_said(tmp_path: Path):
    root = put_loop(tmp_path, [WORSE, BETTER], [solved({"x": (2, 4)})])
    whole = read_figures([root])
    shutil.rmtree(root / "evaluations" / "step-0001")
    shutil.rmtree(root / "steps")
    figures = read_figures([root])
    assert whole.headline is not None and figures.headline is not None
    assert figures.headline.difference == whole.headline.difference
    assert [point.from_store for point in figures.points] == [True, False]
    assert (figures.collected[0].solved, figures.collected[0].graded) == (2, 4)
    assert sum("its store cannot be read" in note for note in figures.notes) == 2


def test_the_stores_count_and_not_the_state(tmp_path: Path):
    root = put_loop(tmp_path, [WORSE, BETTER])
    state = json.loads((root / "state.json").read_text())
    state["evaluations"][1] |= {"solved": 20}
    (root / "state.json").write_text(json.dumps(state))
    figures = read_figures([root])
    assert figures.points[1].solved == 16
    assert any("the state says 20 of 20 solved, the store 16 of 20" in note for note in figures.notes)


def test_a_trainers_metrics(tmp_path: Path):
    lines = [
        '{"step": 2, "loss": 0.4, "skipped": {"too long": 3}}',
        '{"step": 1, "loss": NaN, "grad_norm": null, "note": "x", "ok": true, "huge": 1e300}',
        "[1, 2]",
        '{"step": "one"}',
        "not json",
        '{"step": 2, "loss": 0.3, "skipped": {"too long": 1}}',
        '{"step": 3, "updated": false, "loss": 0.0, "groups": 4, "mismatch_mean": 0.0}',
        '{"step": 4, "loss": 0.1',
    ]
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "metrics.jsonl").write_text("\n".join(lines))
    figures = read_figures([tmp_path])
    assert figures.kind == "training"
    assert [(step.step, step.values) for step in figures.training] == [
        (1, {}),
        (2, {"loss": 0.3}),
        (3, {"groups": 4.0}),
    ]
    assert figures.training[1].skipped == {"too long": 1.0}
    assert figures.notes == (
        "metrics.jsonl: 3 lines are no metrics of a step and were left out",
        "nothing was learned in 1 of 3 steps: 3",
    )


def test_an_empty_store_and_a_store_without_a_run(tmp_path: Path):
    Store.open(tmp_path).close()
    figures = read_figures([tmp_path])
    assert figures.points[0].graded == 0 and "holds no run yet" in figures.notes[0]
    assert sentence(figures) == "There is no graded rollout in it."
    pending = read_figures([put_run(tmp_path / "run", {"a": [End(None), End(None)]})])
    assert sentence(pending) == "2 rollouts are pending." and pending.tasks == ()


def test_of_several_runs_in_a_store_the_newest_counts_and_that_is_said(tmp_path: Path):
    put_run(tmp_path, WORSE)
    figures = read_figures([put_run(tmp_path, {"a": [End(1.0)]}, run_id="run2")])
    assert figures.points[0].graded == 1 and "holds 2 runs" in figures.notes[0]


def test_what_is_no_run(tmp_path: Path):
    with pytest.raises(ConfigError, match="has no run"):
        read_figures([tmp_path])
    with pytest.raises(ConfigError, match="2 labels for 1 runs"):
        read_figures([put_run(tmp_path / "run", WORSE)], ["a", "b"])
    loop = put_loop(tmp_path / "loop", [WORSE])
    with pytest.raises(ConfigError, match=r"--label: .*loop is not a run"):
        read_figures([loop], ["a"])
    with pytest.raises(ConfigError, match="a loop cannot be compared with other runs"):
        read_figures([tmp_path / "run", loop])
    (loop / "state.json").write_text('{"version": 3}')
    with pytest.raises(StoreError, match=r"state\.json"):
        read_figures([loop])
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "store.db").write_bytes(b"SQLite format 3\0" + bytes(4000))
    with pytest.raises(StoreError, match="damaged"):
        read_figures([tmp_path / "damaged"])


def test_numbers_of_a_trainer_that_no_float_holds_are_left_out(tmp_path: Path):
    rows = [{"step": 1, "loss": 10**400, "kl": 0.5}, {"step": 10**400, "loss": 1.0}, {"step": -1, "loss": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    figures = read_figures([tmp_path])
    assert [(step.step, step.values) for step in figures.training] == [(1, {"kl": 0.5})]
    assert figures.notes == ("metrics.jsonl: 2 lines are no metrics of a step and were left out",)
