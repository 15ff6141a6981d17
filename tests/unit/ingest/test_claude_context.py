"""Logs of real versions of Claude Code beside the requests that they sent: each turn is read as it was sent."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
SENT = ROOT / "tests/data/claude_code_sent"
FIDELITY = runpy.run_path(str(ROOT / "bench/fidelity.py"))


def wanted(version: Path) -> dict[str, list[dict[str, Any]]]:
    """The context of each turn by its message id."""
    contexts: dict[str, list[dict[str, Any]]] = {}
    context: list[dict[str, Any]] = []
    for line in (version / "expected.jsonl").read_text().splitlines():
        row = json.loads(line)
        context = [*context[: row["keep"]], *row["context"]]
        contexts[row["message_id"]] = FIDELITY["expected"](json.loads(json.dumps(context)))
    return contexts


@pytest.mark.parametrize("version", sorted(path.parent.name for path in SENT.glob("*/expected.jsonl")))
def test_rebuilt_contexts_equal_the_recorded_requests(version: str) -> None:
    files = sorted(path for path in (SENT / version / "projects").rglob("*") if path.is_file())
    contexts = FIDELITY["ours"](files)
    want = wanted(SENT / version)
    assert contexts.keys() >= want.keys() and want
    for key, context in want.items():
        assert contexts[key][0] == context, key


def test_states_of_versions_with_a_ledger_have_ledger_fidelity() -> None:
    for version in ("2.1.300-print", "2.1.330-print"):
        files = sorted(path for path in (SENT / version / "projects").rglob("*") if path.is_file())
        assert {fidelity for _, fidelity in FIDELITY["ours"](files).values()} == {"ledger"}
