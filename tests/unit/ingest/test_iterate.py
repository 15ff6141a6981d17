"""States of logs as an iterator."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from understudy.errors import ConfigError
from understudy.ingest.iterate import ingest

from support.ingest import DATA


def test_logs_are_iterated_each_state_once(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no log")
    skipped: Counter[str] = Counter()
    states = list(ingest([DATA / "gemini.jsonl", str(DATA / "gemini.jsonl"), tmp_path], skipped=skipped))
    assert states and len({state.state_id for state in states}) == len(states)
    assert all(state.messages for state in states) and skipped["unknown_format"] == 1
    assert [state.state_id for state in ingest([DATA / "gemini.jsonl"], format="gemini")] == [
        state.state_id for state in states
    ]
    with pytest.raises(ConfigError, match="unknown log format 'no'"):
        next(ingest([tmp_path], format="no"))
