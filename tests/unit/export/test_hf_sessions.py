"""`export hf` of sessions: one dataset that loads, with what is known of each session and turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from understudy.cli.app import app
from understudy.errors import ConfigError
from understudy.export.base import ExportSummary
from understudy.export.corpus import Corpus, ExportSelection, Origin, Unit
from understudy.export.files import MANIFEST, SCHEMA, read_manifest
from understudy.export.formats import hf
from understudy.redact.redactor import Redactor
from understudy.store import Store
from understudy.trajectory.roles import ROLES

from support import optional
from support.export import put_rollouts, put_sessions, session

datasets: Any = optional("datasets")


def export(
    directory: Path, output: Path, unit: Unit = "conversation", origins: tuple[Origin, ...] = ("sessions",)
) -> ExportSummary:
    with Store.open(directory, create=False) as store:
        selection = ExportSelection(origins=origins, roles=ROLES, test_share=0.0)
        return hf.export(Corpus(store, selection, Redactor(bytes(32))), output, unit=unit)


def test_rows_are_conversations_with_tools_and_session_metadata(tmp_path: Path):
    put_sessions(tmp_path / "store", [session("one"), session("two", project="/home/ann/other")])
    exported = export(tmp_path / "store", tmp_path / "out")
    assert (exported.rows, exported.origins, exported.sources) == (4, {"session": 4}, {"chat": 4})
    assert (exported.licences, exported.tools_sources) == ({"unknown": 4}, {"logged": 4})
    rows = list(datasets.load_dataset(str(tmp_path / "out"), split="train", cache_dir=str(tmp_path / "cache")))
    assert {row["session_id"] for row in rows} == {"session-one", "session-two"}
    for row in rows:
        called = {call["function"]["name"] for one in row["messages"] for call in one.get("tool_calls") or ()}
        assert called <= {tool["function"]["name"] for tool in json.loads(row["tools"])}
        assert len(row["trained"]) == len(row["answer_ids"]) == len(row["signals"])
        assert all(row["messages"][index]["role"] == "assistant" for index in row["trained"])
        assert row["answer_ids"][-1] == row["example_id"]
        assert row["group"].endswith(("/project", "/other")) and row["fidelity"] == "exact"
    assert [each["tests"] for row in rows for each in row["signals"]].count("passed") == 2
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| chat | 4 |" in card and "licence of the source" in card and "`signals` tell" in card


def test_unit_turn_exports_one_row_for_each_turn(tmp_path: Path):
    put_sessions(tmp_path / "store", [session("one")])
    assert export(tmp_path / "store", tmp_path / "out", "turn").rows == 4


def test_a_store_with_sessions_and_rollouts_needs_the_from_option(tmp_path: Path):
    put_sessions(tmp_path / "store", [session("one")])
    put_rollouts(tmp_path / "store", tasks=1, samples=1)
    done = CliRunner().invoke(app, ["export", "hf", str(tmp_path / "store"), "--output", str(tmp_path / "none")])
    assert isinstance(done.exception, ConfigError) and "--from sessions or --from rollouts" in str(done.exception)
    assert export(tmp_path / "store", tmp_path / "out").origins == {"session": 2}
    assert export(tmp_path / "store", tmp_path / "both", origins=("rollouts",)).instances == 1


def test_an_export_has_the_version_of_its_schema_and_a_later_one_is_refused(tmp_path: Path):
    put_sessions(tmp_path / "store", [session("one")])
    export(tmp_path / "store", tmp_path / "out")
    path = tmp_path / "out" / MANIFEST
    manifest = json.loads(path.read_text())
    assert manifest["schema"] == SCHEMA
    assert f"schema {SCHEMA})" in (tmp_path / "out" / "README.md").read_text()
    path.write_text(json.dumps({key: value for key, value in manifest.items() if key != "schema"}))
    assert read_manifest(tmp_path / "out") is not None, "what earlier releases wrote is read"
    path.write_text(json.dumps({**manifest, "schema": SCHEMA + 1}))
    with pytest.raises(ConfigError, match="a newer release wrote it; update understudy"):
        read_manifest(tmp_path / "out")
