"""The key of redaction and its report."""

from __future__ import annotations

import json
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from understudy.errors import ConfigError
from understudy.redact.pseudonyms import key_path, load_key
from understudy.redact.redactor import Redactor
from understudy.redact.report import RedactionReport, write_report_beside

AWS = "AKIAQ3EGRIJ7XKXBKYTB"


def test_the_key_is_made_once_for_the_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    path = tmp_path / "data" / "understudy" / "redaction.key"
    assert key_path() == path
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(lambda _: load_key(), range(16)))
    assert len(keys) == 1 and len(keys.pop()) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["redaction.key"]
    assert load_key() == load_key()


def test_a_relative_data_home_is_ignored_for_the_key_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "data")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert key_path() == tmp_path / ".local" / "share" / "understudy" / "redaction.key"


def test_an_unusable_key_file_is_a_config_error_with_the_repair(tmp_path: Path) -> None:
    path = tmp_path / "redaction.key"
    load_key(path)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_key(path)
    path.chmod(0o600)
    path.write_text("abc")
    with pytest.raises(ConfigError, match="64 hex digits"):
        load_key(path)
    with pytest.raises(ConfigError, match="expected a regular file"):
        load_key(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="redaction key cannot be read"):
        load_key(tmp_path / "file" / "redaction.key")


def test_the_report_names_rules_and_places_and_no_secret(tmp_path: Path) -> None:
    redactor = Redactor(b"k" * 32, betterleaks=False)
    redactor.text(f"{AWS} and {AWS} /home/alice/x", "first")
    redactor.value({"a": AWS}, "second")
    assert redactor.report.counts == {"aws-key-id": 3, "home-path": 1}
    redactor.text(f"{AWS} and {AWS} /home/alice/x", "first")
    assert redactor.report.total == 4
    path = tmp_path / "report.json"
    redactor.report.write(path)
    text = path.read_text()
    report = json.loads(text)
    assert AWS not in text and "alice" not in text
    assert report["replaced"] == 4 and report["by_rule"] == {"aws-key-id": 3, "home-path": 1}
    assert {(entry["where"], entry["rule"], entry["times"]) for entry in report["places"]} == {
        ("first", "aws-key-id", 2),
        ("first", "home-path", 1),
        ("second", "aws-key-id", 1),
    }
    with pytest.raises(ConfigError, match="cannot be written"):
        redactor.report.write(tmp_path / "none" / "report.json")


def test_a_report_bounds_its_places_and_reports_can_be_merged() -> None:
    report, other = RedactionReport(places=2), RedactionReport()
    for number in range(5):
        report.add(f"place {number}", "jwt", "[JWT_abcdef]")
    assert report.counts == {"jwt": 5} and len(report.to_json()["places"]) == 2
    assert report.to_json()["places_left_out"] == {"jwt": 3}
    other.merge(report.places(), report.more)
    other.add("elsewhere", "email", "user_abcdef@example.com", 2)
    assert other.counts == {"jwt": 5, "email": 2}


def test_a_report_is_written_beside_its_file_and_removed_when_there_is_none(tmp_path: Path) -> None:
    redactor = Redactor(b"k" * 32, betterleaks=False)
    redactor.text(AWS, "here")
    path = write_report_beside(tmp_path / "states.jsonl", redactor.report)
    assert path is not None and path.name == "states.jsonl.redaction.json"
    assert path.stat().st_mode & 0o777 == 0o600 and AWS not in path.read_text()
    assert json.loads(path.read_text())["by_rule"] == {"aws-key-id": 1}
    assert write_report_beside(tmp_path / "states.jsonl", None) is None and not path.exists()
