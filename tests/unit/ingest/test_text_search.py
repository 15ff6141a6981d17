"""`understudy states --text`: each text is found once, where it was new, and what is shown of it is redacted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from understudy.cli.app import app
from understudy.errors import ConfigError
from understudy.ingest.text_search import HIDDEN, search_texts
from understudy.redact.redactor import Redactor
from understudy.store import Store

from support.export import Log, put_sessions, session

SECRET = "AKIAQ3EGRFTAV7WX5LSN"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    log = Log("two", project="/home/ann/other")
    ask = log.user(-1, f"The KEY is {SECRET}; straße")
    first = log.answer(
        ask, None, [("c1", "Bash", {"command": "grep -n 'no such\nfile' config.toml"})], thinking="Hm, why?"
    )
    log.answer(log.result(first, "c1", "config.toml: no such file " + "x" * 300), "The CONFIG is missing.")
    put_sessions(tmp_path, [session("one"), log.trace])
    with Store.open(tmp_path) as new_store:
        yield new_store


def found(store: Store, query: str, where: str | None = None) -> list[tuple[str, str]]:
    numbers = {
        row[0]: f"{row[1]} {row[2]}" for row in store.sessions.table(("state_id", "trace_id", "message_id"))
    }
    return [(numbers[match.state_id], match.role) for match in search_texts(store.sessions, query, where, None)]


@pytest.mark.parametrize(
    ("query", "where", "states"),
    [
        ("mend", None, [("one m0", "user")]),
        ("DONE", None, [("one m2", "assistant")]),
        ("ls -l", None, [("one m0", "assistant")]),
        ("a.py", None, [("one m1", "assistant")]),
        ("a.py another", None, []),
        ("another", None, [("one m3", "user")]),
        ("hm, why?", None, [("two m0", "assistant")]),
        ("config missing", None, [("two m1", "assistant")]),
        ('"no such file"', None, [("two m1", "tool")]),
        ("such file", "trace_id = 'two'", [("two m0", "assistant"), ("two m1", "tool")]),
        ("such file", "trace_id = 'one'", []),
        ("STRASSE", None, [("two m0", "user")]),
    ],
)
def test_a_search_finds_the_state_in_which_the_text_first_appeared(
    store: Store, query: str, where: str | None, states: list[tuple[str, str]]
):
    assert found(store, query, where) == states


def test_a_text_first_seen_in_an_unselected_turn_is_not_found_in_later_ones(store: Store):
    assert found(store, "mend", "position = 1") == []


def test_snippets_are_short_and_redacted(store: Store):
    (long,) = search_texts(store.sessions, '"no such file"', None, None)
    assert len(long.snippet) < 140 and long.snippet.endswith("…")
    (raw,) = search_texts(store.sessions, "key straße", None, None)
    assert SECRET in raw.snippet
    (clean,) = search_texts(store.sessions, "key straße", None, Redactor(bytes(32)))
    assert SECRET not in clean.snippet and "KEY is" in clean.snippet
    (hidden,) = search_texts(store.sessions, SECRET, None, Redactor(bytes(32)))
    assert hidden.snippet == HIDDEN


def test_an_empty_query_is_refused(store: Store):
    with pytest.raises(ConfigError, match=r"--text: no word to search for in ' *'; give at least one"):
        list(search_texts(store.sessions, "  ", None, None))


def test_the_text_option_combines_with_the_other_filters(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))

    def states(*options: str) -> str:
        done = CliRunner().invoke(app, ["states", str(tmp_path), "--text", "such file", *options])
        assert done.exit_code == 0, done.output
        return done.stdout

    table = states()
    assert "2 states" in table and "config.toml: no such file" in table
    lines = [json.loads(line) for line in states("--json").splitlines()]
    assert [line["match"]["role"] for line in lines] == ["assistant", "tool"]
    assert all(line["match"]["state_id"] == line["state_id"] for line in lines)
    assert len(states("--json", "--limit", "1").splitlines()) == 1
    assert states("--json", "--limit", "1") == states("--json", "--limit", "1")
    assert json.loads(states("--by", "trace_id", "--json")) == [
        {"trace_id": "two", "states": 2, "conversations": 1}
    ]
    states("--output", str(tmp_path / "out.jsonl"))
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2
    assert states("--where", "trace_id = 'one'").strip() == "0 states"
