"""How a conversation ended, of the logs that say so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from understudy.ingest.formats.base import outcome_from
from understudy.ingest.trace import TraceOutcome

from support.ingest import DATA, read


def test_rows_of_data_sets_have_the_resolved_outcome_of_their_task() -> None:
    solved, failed = read(DATA / "swesmith.jsonl")
    assert solved.outcome == TraceOutcome(resolved=True, task="demo__greet.abc12345.lm_rewrite___1")
    assert failed.outcome is not None and failed.outcome.resolved is False
    (row,) = read(DATA / "nebius_openhands.jsonl")
    assert row.outcome == TraceOutcome(resolved=True, task="demo__greet-1", exit_status="submit")
    (row,) = read(DATA / "nebius_sweagent.jsonl")
    assert row.outcome == TraceOutcome(resolved=True, task="demo__greet-1", exit_status="submitted")


def test_an_agents_own_log_gives_its_exit_status_but_no_resolved_flag(tmp_path: Path) -> None:
    (trace,) = read(DATA / "sweagent.traj")
    assert (
        trace.outcome is not None and trace.outcome.exit_status == "submitted" and trace.outcome.resolved is None
    )
    (trace,) = read(DATA / "miniswe_1.traj.json")
    assert trace.outcome == TraceOutcome(task="demo__greet-1", exit_status="Submitted")
    log = json.loads((DATA / "sweagent.traj").read_text())
    log["info"]["resolved"] = False
    path = tmp_path / "psf__requests-863.traj"
    log.pop("environment")
    path.write_text(json.dumps(log))
    (trace,) = read(path)
    assert trace.outcome == TraceOutcome(resolved=False, task="psf__requests-863", exit_status="submitted")


def test_an_evaluation_of_openhands_has_its_report(tmp_path: Path) -> None:
    row = json.loads((DATA / "openhands_v0_output.jsonl").read_text().splitlines()[0])
    row["test_result"] = {"git_patch": "", "report": {"resolved": True, "empty_generation": False}}
    row["error"] = "AgentStuckInLoopError: the agent repeats itself"
    (tmp_path / "output.jsonl").write_text(json.dumps(row) + "\n")
    (trace,) = read(tmp_path / "output.jsonl")
    assert trace.outcome == TraceOutcome(
        resolved=True, task="demo__greet-1", exit_status="AgentStuckInLoopError: the agent repeats itself"
    )


@pytest.mark.parametrize(
    ("extra", "metrics", "expected"),
    [
        ({"reward": 1.0, "resolved": True}, {}, TraceOutcome(reward=1.0, resolved=True)),
        ({"task": "t-1"}, {"extra": {"reward": 0}}, TraceOutcome(reward=0.0, task="t-1")),
        ({"verifier_result": {"rewards": {"reward": 0.5}}}, {}, TraceOutcome(reward=0.5)),
        ({"reward": "high", "resolved": "perhaps"}, {}, None),
        (None, {"total_steps": 2}, None),
    ],
)
def test_atif_has_its_reward_in_the_free_fields(tmp_path: Path, extra: Any, metrics: Any, expected: Any) -> None:
    log = json.loads((DATA / "atif.json").read_text())
    log["extra"], log["final_metrics"] = extra, metrics
    (tmp_path / "trajectory.json").write_text(json.dumps(log))
    assert read(tmp_path / "trajectory.json")[0].outcome == expected


def test_invalid_outcome_values_are_left_out() -> None:
    assert outcome_from() is None and outcome_from(resolved=2, reward=float("nan"), task="", exit_status=3) is None
    assert outcome_from(reward=True) is None and outcome_from(reward=10**400) is None
    assert outcome_from(resolved=0) == TraceOutcome(resolved=False)
    assert outcome_from(resolved="resolved") == TraceOutcome(resolved=True)
    assert outcome_from(exit_status="x" * 999) == TraceOutcome(exit_status="x" * 200)


def test_rows_of_parquet_have_their_outcome(tmp_path: Path) -> None:
    arrow: Any = pytest.importorskip("pyarrow")
    parquet: Any = pytest.importorskip("pyarrow.parquet")
    rows = [json.loads(line) for line in (DATA / "swesmith.jsonl").read_text().splitlines()]
    for row in rows:
        row["messages"] = row["messages"] if isinstance(row["messages"], str) else json.dumps(row["messages"])
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert [trace.outcome.resolved for trace in read(tmp_path / "rows.parquet") if trace.outcome] == [True, False]
