"""Weights by signal: how often answers are learned, the same for the same seed, and told on the card."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from understudy import plugins
from understudy.errors import ConfigError
from understudy.export.base import ExportSummary
from understudy.export.corpus import Corpus, ExportSelection
from understudy.export.mixture import NOT_DRAWN, WeightRule, parse_weight_rule
from understudy.redact.redactor import Redactor
from understudy.store import Store

from support.export import put_rollouts, put_sessions, rows, session

PASSED, STOPPED = "tests = 'passed'", "interrupted"


def export(directory: Path, output: Path, *weights: str, unit: str = "turn", **options: Any) -> ExportSummary:
    selection = {"origins": ("sessions",), "test_share": 0.0, **options}
    with Store.open(directory, create=False) as store:
        rules = tuple(map(parse_weight_rule, weights))
        corpus = Corpus(store, ExportSelection(weights=rules, **selection), Redactor(bytes(32)))
        return plugins.load("exports", "openai")(corpus, output, unit=unit)


def last_words(output: Path) -> Counter[str]:
    """The last message of each row."""
    messages = [row["messages"][-1] for row in rows(output / "train.jsonl")]
    return Counter(message.get("content") or message["tool_calls"][0]["function"]["name"] for message in messages)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    put_sessions(tmp_path / "store", [session(f"s{n}", project=f"/srv/p{n}") for n in range(8)])
    return tmp_path / "store"


def test_turns_are_repeated_or_dropped_according_to_their_weight(store: Path, tmp_path: Path):
    exported = export(store, tmp_path / "out", f"3: {PASSED}", f"0: {STOPPED}", "0.5: commits > 0")
    counts = last_words(tmp_path / "out")
    assert (counts["I look."], counts["Edit"], counts["Then I stop."]) == (8, 24, 0)
    assert 0 < counts["Done ✓."] < 8
    assert exported.left_out[NOT_DRAWN] == 8 + 8 - counts["Done ✓."]
    parts = [(part.weight, part.condition, part.answers, part.learned) for part in exported.mixture]
    done = counts["Done ✓."]
    assert parts == [
        (3, PASSED, 8, 24),
        (0, STOPPED, 8, 0),
        (0.5, "commits > 0", 8, done),
        (1, "all others", 8, 8),
    ]
    assert exported.rows == counts.total() == exported.origins["session"]


def test_the_first_matching_weight_applies_and_draws_depend_on_the_seed(store: Path, tmp_path: Path):
    weights = ("1.5: 1", f"3: {PASSED}")
    drawn = [export(store, tmp_path / f"out{n}", *weights, seed=seed).rows for n, seed in enumerate((1, 1, 2))]
    texts = [(tmp_path / f"out{n}" / "train.jsonl").read_bytes() for n in range(3)]
    assert texts[0] == texts[1] != texts[2]
    assert all(32 < number < 64 for number in drawn)


def test_a_conversation_is_weighted_by_the_mean_of_its_answers(store: Path, tmp_path: Path):
    exported = export(store, tmp_path / "out", "3: tool_calls > 0", unit="conversation")
    # Of the two conversations of a session one has a turn of weight 3 and one of weight 1: their mean is 2.
    assert exported.rows == 8 + 2 * 8
    assert [(part.answers, part.learned) for part in exported.mixture] == [(8, 16), (24, 32)]


def test_card_and_manifest_list_the_mixture_with_redacted_conditions(store: Path, tmp_path: Path):
    export(store, tmp_path / "out", "2: project LIKE '/home/annabel/secret%'", f"2: {PASSED}")
    card = (tmp_path / "out" / "README.md").read_text()
    manifest = (tmp_path / "out" / "understudy.json").read_text()
    assert "## Mixture" in card and "| 2 | tests = 'passed' | 8 | 16 |" in card
    assert "annabel" not in card and "annabel" not in manifest
    assert json.loads(manifest)["mixture"][1]["learned"] == 16


def test_weights_do_not_change_the_test_split_or_rollouts(store: Path, tmp_path: Path):
    put_rollouts(store, tasks=1, samples=1)
    plain = export(store, tmp_path / "plain", origins=("sessions", "rollouts"), test_share=0.4, solved_only=False)
    heavy = export(store, tmp_path / "heavy", "5: 1", origins=("sessions", "rollouts"), test_share=0.4)
    assert plain.splits["test"] == heavy.splits["test"] > 0
    assert plain.origins["rollout"] == heavy.origins["rollout"] > 0
    assert heavy.splits["train"] > 3 * plain.splits["train"]


@pytest.mark.parametrize("text", ["tests = 'passed'", "x: 1", "-1: 1", "3:", "1000: 1"])
def test_an_invalid_weight_is_refused(text: str):
    with pytest.raises(ConfigError, match=r"--weight: got .*, expected a number from 0 to 100"):
        parse_weight_rule(text)


def test_a_weight_with_an_invalid_condition_is_refused(store: Path, tmp_path: Path):
    assert parse_weight_rule(" 0.25 : a = ':' ") == WeightRule(0.25, "a = ':'")
    with pytest.raises(ConfigError, match="cannot select states"):
        export(store, tmp_path / "out", "2: nonsense = 1")
