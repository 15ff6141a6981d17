"""The files beside a run's store: what an agent named, what cannot be written, what is written again."""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy

from understudy.gateway.config import GatewayConfig, ModelConfig, ModelsConfig
from understudy.run.config import RunConfig
from understudy.run.rollout_files import RolloutFiles
from understudy.store import Store
from understudy.types import ErrorInfo, Integrity, Verdict

from support import calc_task
from support.trajectory import Session, text, user

CLEAN = Verdict(reward=1.0, reason="x", tests={"test_calc.py::test_shift": "passed"}, log="1 passed\n")


def wait(future: Future[Any]) -> Any:
    return future.result(30)


def config(**changes: Any) -> RunConfig:
    high = ModelConfig(backend="vllm", model="big", base_url="http://127.0.0.1:9/v1")
    return RunConfig(gateway=GatewayConfig(models=ModelsConfig(high=high)), tasks={"calc-0": "1"}, **changes)


def begun(store: Store, run: RunConfig) -> str:
    """The one rollout of a run, put into the store."""
    task = calc_task()
    rollout = run.rollout_id(task.instance_id, 0)
    wait(store.runs.create(run.run_id, run.record()))
    wait(store.runs.add_tasks(run.run_id, [task]))
    wait(store.runs.create_rollouts(run.run_id, [(rollout, task.instance_id, 0)]))
    return rollout


def graded(
    store: Store,
    rollout: str,
    verdict: Verdict = CLEAN,
    *,
    tokens: bool = True,
    logs: dict[str, bytes] | None = None,
    error: ErrorInfo | None = None,
) -> None:
    """Give the rollout an attempt of one call that ended with this verdict."""
    attempt = wait(store.runs.start_attempt(rollout))
    wait(store.runs.mark_running(attempt.id))
    session = Session(attempt.id)
    ids = {"prompt": (1, 2), "completion": (3, 4), "logprobs": (-0.5, -0.5)}
    session.ask([user(text("go"))], [text("Done.")], backend="vllm", **ids)
    for call in session.calls:
        wait(store.calls.append(call))
    end = store.runs.finish_attempt(
        attempt.id,
        "failed" if error else "succeeded",
        "succeeded",
        patch=b"+x\n",
        verdict=verdict,
        error=error,
        logs=logs or {"stream.jsonl": b"{}\n"},
    )
    wait(end)


async def test_rollouts_whose_agent_crashed_and_that_were_graded_are_counted(tmp_path: Path):
    run, out = config(), tmp_path / "out"
    with Store.open(out) as store:
        rollout = begun(store, run)
        graded(store, rollout, error=ErrorInfo("agent", "AgentError", "it ended by signal 9"))
        for _ in range(2):  # once written, and once as it is there
            outputs = RolloutFiles(store, run, out)
            await outputs.catch_up()
            assert any("1 rollouts were graded although the agent crashed" in note for note in outputs.notes())


async def test_names_that_an_agent_chose_lead_nowhere(tmp_path: Path):
    deep = "/".join("d" * 12)
    names = [
        "../../out.txt",
        "/etc/passwd",
        "session/../../x",
        "session/a.jsonl",
        "session/a.jsonl/b",
        "a\nb",
        deep,
    ]
    names += ["rollout.json", "s/" + "n" * 250, "", ".", "x", "x/y", "stream.jsonl"]
    run, out = config(), tmp_path / "out"
    with Store.open(out) as store:
        rollout = begun(store, run)
        graded(store, rollout, logs={name: name.encode() for name in names})
        outputs = RolloutFiles(store, run, out)
        await outputs.write(rollout)
    assert outputs.notes() == ()
    assert os.listdir(tmp_path) == ["out"]  # noqa: PTH208 - nothing else came to be
    written = {path: path.read_bytes() for path in (out / "logs" / "calc-0").rglob("*") if path.is_file()}
    assert set(written.values()) >= {name.encode() for name in names}
    assert json.loads((out / "logs" / "calc-0" / "rollout.json").read_text())["reward"] == 1.0
    assert (out / "logs" / "calc-0" / "session" / "a.jsonl").read_bytes() == b"session/a.jsonl"


async def test_what_cannot_be_written_is_noted_and_written_later(tmp_path: Path):
    run, out = config(), tmp_path / "out"
    with Store.open(out) as store:
        rollout = begun(store, run)
        graded(store, rollout)
        (out / "logs").write_text("in the way")
        outputs = RolloutFiles(store, run, out)
        await outputs.write(rollout)
        (note, *_) = outputs.notes()
        assert "could not be written" in note
        assert "logs" in note
        (out / "logs").unlink()
        await outputs.finish()
        assert outputs.notes() == ()
        assert (out / "logs" / "calc-0" / "rollout.json").exists()
        assert (out / f"big.{run.run_id}.json").exists()


async def test_of_what_is_half_written_only_its_own_is_removed(tmp_path: Path):
    run, out = config(), tmp_path / "out"
    with Store.open(out) as store:
        begun(store, run)
        foreign = [".notes.new", ".summary.json.new", f".big.other{run.run_id[1:]}.json.7.new", ".a.json.x.new"]
        for name in foreign:
            (out / name).write_text("kept")
        (out / ".directory.7.new").mkdir()
        half = out / f".big.{run.run_id}.json.4711.new"
        half.write_text("{")
        outputs = RolloutFiles(store, run, out)
        await outputs.catch_up()
        assert outputs.notes() == ()
        assert not half.exists()
        assert [(out / name).read_text() for name in foreign] == ["kept"] * 4
        assert (out / ".directory.7.new").is_dir()


async def test_a_suspicious_patch_has_a_report_and_nothing_to_train_on(tmp_path: Path):
    run, out = config(), tmp_path / "out"
    with Store.open(out) as store:
        rollout = begun(store, run)
        verdict = Verdict(reward=1.0, reason="x", integrity=Integrity("suspicious", "it ends the process"))
        graded(store, rollout, verdict)
        outputs = RolloutFiles(store, run, out)
        await outputs.finish()
    assert not (out / "stream_calc-0.json").exists()
    assert not (out / "dataset-calc-0").exists()
    assert (out / "logs" / "calc-0" / "patch.diff").exists()
    assert len(list((out / "logs" / "run_evaluation").rglob("report.json"))) == 1
    (note,) = outputs.notes()
    assert "--include-suspicious" in note


async def test_without_the_package_pyarrow_the_run_says_so_and_writes_them_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("pyarrow")
    run, out = config(), tmp_path / "out"
    with Store.open(out) as store:
        rollout = begun(store, run)
        graded(store, rollout)
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "pyarrow", None)  # what an import meets where it is not installed
            outputs = RolloutFiles(store, run, out)
            await outputs.finish()
            (note,) = outputs.notes()
            assert "pip install 'understudy[hf]'" in note
            assert (out / "stream_calc-0.json").exists()
        outputs = RolloutFiles(store, run, out)
        await outputs.finish()
        assert outputs.notes() == ()
        assert (out / "dataset-calc-0").is_dir()


async def test_a_rollout_whose_files_are_there_is_not_read_again_until_it_changes(tmp_path: Path):
    run, out = config(samples=3), tmp_path / "out"
    queries: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        queries.append(statement)

    with Store.open(out) as store:
        rollout = begun(store, run)
        graded(store, rollout)
        outputs = RolloutFiles(store, run, out)
        await outputs.catch_up()
        sqlalchemy.event.listen(sqlalchemy.Engine, "before_cursor_execute", note)
        try:
            await outputs.catch_up()
            assert len(queries) == 1  # which rollouts there are
            await outputs.finish()
            assert len(queries) == 3  # the same, and once more for the summary
        finally:
            sqlalchemy.event.remove(sqlalchemy.Engine, "before_cursor_execute", note)
        summary = json.loads((out / f"big.{run.run_id}.json").read_text())
        assert summary["resolved_ids"] == ["calc-0.0"]


async def test_a_rollout_that_failed_and_then_ended_well(tmp_path: Path):
    run, out = config(samples=2), tmp_path / "out"
    with Store.open(out) as store:
        rollout = begun(store, run)
        attempt = wait(store.runs.start_attempt(rollout))
        wait(store.runs.mark_running(attempt.id))
        error = ErrorInfo("sandbox", "SandboxError", "it broke")
        wait(store.runs.finish_attempt(attempt.id, "failed", "failed", error=error))
        outputs = RolloutFiles(store, run, out)
        await outputs.finish()
        note = json.loads((out / "logs" / "calc-0.0" / "rollout.json").read_text())
        assert (note["reward"], note["reason"]) == (None, "sandbox: it broke")
        assert not (out / "stream_calc-0.0.json").exists()
        summary = json.loads((out / f"big.{run.run_id}.json").read_text())
        assert summary["error_ids"] == ["calc-0.0"]
        wait(store.runs.requeue_failed(run.run_id))
        graded(store, rollout)
        await outputs.finish()
        assert json.loads((out / "logs" / "calc-0.0" / "rollout.json").read_text())["reward"] == 1.0
        assert (out / "stream_calc-0.0.json").exists()
