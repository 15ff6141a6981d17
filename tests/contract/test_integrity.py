"""Suspicious patches: kept in the store with their evidence, shown, counted, left out of exports, reviewed."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from understudy.errors import StoreError
from understudy.store import Store
from understudy.store.schema import metadata
from understudy.store.sqlite import open_engine
from understudy.types import Evidence, Integrity, Verdict

from support import calc_task, understudy
from support.export import export_hf as export
from support.trajectory import Session, text, user

DATA = Path(__file__).parents[1] / "data"
FORGED = Integrity("suspicious", "it ends the tests' process", (Evidence("exit", "calc.py", 7, "os._exit(0)"),))


def fill(directory: Path, *suspicious: bool, task: int = 0) -> None:
    """A store with a graded rollout of one task for each of `suspicious`; all of them resolved."""
    with Store.open(directory) as store:
        store.runs.create("run", {}).result()
        store.runs.add_tasks("run", [calc_task(task)]).result()
        ids = [f"r{number}" for number in range(len(suspicious))]
        store.runs.create_rollouts("run", [(id, f"calc-{task}", number) for number, id in enumerate(ids)]).result()
        for id, forged in zip(ids, suspicious, strict=True):
            attempt = store.runs.start_attempt(id).result()
            store.runs.mark_running(attempt.id).result()
            session = Session(attempt.id)
            session.ask([user(text("Mend it."))], [text("Done.")], prompt=[1], completion=[2], logprobs=[-0.5])
            for call in session.calls:
                store.calls.append(call).result()
            verdict = Verdict(reward=1.0, reason="all pass", integrity=FORGED if forged else Integrity())
            ended: Any = {"patch": b"+x\n", "verdict": verdict}
            store.runs.finish_attempt(attempt.id, "succeeded", "succeeded", **ended).result()


def test_a_store_of_the_release_before_is_brought_up_with_all_it_holds(tmp_path: Path):
    with sqlite3.connect(tmp_path / "store.db") as raw:
        raw.executescript((DATA / "store_0002.sql").read_text())
    raw.close()
    with Store.open(tmp_path) as store:
        verdict = store.runs.verdict("run-0.1")
        assert verdict is not None
        assert (verdict.reward, verdict.reason, verdict.integrity) == (1.0, "because", Integrity())
        (call,) = store.calls.of_attempt("run-0.1")
        assert (call.cost_usd, call.usage.cache_write_tokens, call.audit) == (0.25, 1, {"prompt": "rendered"})
        assert [finding.kind for finding in store.runs.attempt("run-0.1").findings] == ["budget"]
        counts = store.outcomes.counts("run")
        assert (counts.solved, counts.unsolved, counts.suspicious) == (1, 1, 0)
        assert len(store.keys.all()) == 1
        store.runs.review("run-1.1", "suspicious", "seen").result()
        assert store.outcomes.counts("run").suspicious == 1
    engine = open_engine(tmp_path, create=False)
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    engine.dispose()


def test_what_the_grader_found_is_a_column_and_evidence(tmp_path: Path):
    fill(tmp_path, True, False)
    with Store.open(tmp_path) as store:
        verdicts = [store.runs.verdict(f"r{number}.1") for number in range(2)]
        assert [verdict.integrity for verdict in verdicts if verdict] == [FORGED, Integrity()]
        counts = store.outcomes.counts("run")
        assert (counts.solved, counts.suspicious) == (2, 1)
    with sqlite3.connect(tmp_path / "store.db") as raw:
        rows = raw.execute("SELECT integrity, review FROM rewards ORDER BY attempt_id").fetchall()
    raw.close()
    assert rows == [("suspicious", None), ("clean", None)]


def test_a_person_has_the_last_word_and_the_evidence_stays(tmp_path: Path):
    fill(tmp_path, True)
    with Store.open(tmp_path) as store:
        store.runs.review("r0.1", "clean", "a test helper of theirs").result()
        verdict = store.runs.verdict("r0.1")
        assert verdict is not None
        assert verdict.integrity.status == "clean"
        assert verdict.integrity.evidence == FORGED.evidence
        assert verdict.integrity.reason == f"reviewed: a test helper of theirs (before: {FORGED.reason})"
        assert store.outcomes.counts("run").suspicious == 0
        with pytest.raises(StoreError, match="r9 has no verdict"):
            store.runs.review("r9", "clean", "").result()


def test_exports_leave_suspicious_rollouts_out_unless_asked(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    fill(tmp_path, True, False)
    with Store.open(tmp_path, create=False) as store:
        exported = export(store, tmp_path / "a")
        assert (exported.rollouts, exported.rows, exported.suspicious) == (1, 1, 1)
        every = export(store, tmp_path / "b", include_suspicious=True)
        assert (every.rollouts, every.rows, every.suspicious) == (2, 2, 0)
    dataset = datasets.load_from_disk(str(tmp_path / "a" / "dataset-calc-0"))
    assert (dataset["rollout_id"][:], dataset["integrity"][:]) == (["r1"], ["clean"])
    both = datasets.load_from_disk(str(tmp_path / "b" / "dataset-calc-0"))
    assert dict(zip(both["rollout_id"], both["integrity"], strict=True)) == {"r0": "suspicious", "r1": "clean"}
    spans = [json.loads(line) for line in (tmp_path / "b" / "stream_calc-0.json").read_text().splitlines()]
    integrities = [
        span["attributes"].get("understudy.integrity") for span in spans if "annotation" in span["name"]
    ]
    assert integrities == ["suspicious", "clean"]


def test_what_was_exported_before_it_was_found_out_goes(tmp_path: Path):
    pytest.importorskip("datasets")
    fill(tmp_path, False)
    out = tmp_path / "out"
    with Store.open(tmp_path, create=False) as store:
        export(store, out)
        assert {path.name for path in out.iterdir()} >= {"dataset-calc-0", "stream_calc-0.json"}
        store.runs.review("r0.1", "suspicious", "it reads the hidden test").result()
        assert export(store, out).suspicious == 1
        assert list(out.iterdir()) == []


def test_the_commands_show_review_and_export(tmp_path: Path):
    fill(tmp_path, True, False)
    at = ("--dir", tmp_path)
    listed = json.loads(understudy("show", "--json", *at).stdout)["rollouts"]
    assert {each["id"]: each["integrity"] for each in listed} == {"r0": "suspicious", "r1": "clean"}
    assert "suspicious" in understudy("show", *at).stdout
    output = understudy("show", "r0", *at).stdout
    assert "suspicious: it ends the tests' process" in output
    assert "exit   calc.py:7   os._exit(0)" in output
    assert "integrity" not in understudy("show", "r1", *at).stdout
    integrity = json.loads(understudy("show", "r0", "--json", *at).stdout)["verdict"]["integrity"]
    assert msgspec.convert(integrity, Integrity) == FORGED
    assert "1 rollouts with a suspicious patch" in understudy("export", "hf", tmp_path).stderr
    assert json.loads(understudy("export", "hf", tmp_path, "--json").stdout)["suspicious"] == 1
    every = json.loads(understudy("export", "hf", tmp_path, "--json", "--include-suspicious").stdout)
    assert (every["suspicious"], every["rollouts"]) == (0, 2)
    done = understudy("integrity", "r0", "clean", "--reason", "read it", *at)
    assert (done.returncode, done.stdout) == (0, "r0.1 is clean now\n")
    assert "reviewed: read it" in understudy("show", "r0", *at).stdout
    assert understudy("integrity", "r1.1", "suspicious", "--reason", "x", *at).returncode == 0
    assert json.loads(understudy("export", "hf", tmp_path, "--json").stdout)["rollouts"] == 1
    for wrong in (("nobody", "clean"), ("r1.7", "clean"), ("r0", "dirty")):
        assert understudy("integrity", *wrong, "--reason", "x", *at).returncode == 2


def test_exports_can_demand_a_protection_of_the_reward(tmp_path: Path):
    pytest.importorskip("datasets")
    fill(tmp_path, False, False)
    out = tmp_path / "out"
    assert json.loads(understudy("export", "hf", tmp_path, "-o", out, "--json").stdout)["rollouts"] == 2
    with Store.open(tmp_path) as store:
        verdict = store.runs.verdict("r0.1")
        assert verdict is not None
        store.runs.replace_verdict("r0.1", msgspec.structs.replace(verdict, protection="partial")).result()
    partly = json.loads(
        understudy("export", "hf", tmp_path, "-o", out, "--json", "--protection", "partial").stdout
    )
    assert (partly["rollouts"], partly["left_out"]) == (1, {"reward with less protection than demanded": 1})
    strict = json.loads(understudy("export", "hf", tmp_path, "-o", out, "--json", "--protection", "twins").stdout)
    assert (strict["rollouts"], list(out.glob("dataset-*"))) == (0, [])
    rows = understudy("export", "trl-sft", tmp_path, "-o", tmp_path / "b", "--json", "--protection", "partial")
    assert json.loads(rows.stdout)["left_out"]["reward with less protection than demanded"] == 1
