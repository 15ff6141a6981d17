"""The CLI's own log agrees with the calls of a real rollout; a log that was tampered with does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from understudy.agents.session_log import compare_session_log
from understudy.store import Store
from understudy.trajectory.tree import build

from support import understudy

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("claude_code", "isolation")]


def test_a_rollout_and_its_log_agree(calc_tasks: Path, tmp_path: Path):
    done = understudy("run", "embedded", "--tasks", calc_tasks, "--output-dir", tmp_path / "out", "--limit", "2")
    assert done.returncode == 0, done.stderr
    with Store.open(tmp_path / "out", create=False) as store:
        for rollout in store.runs.rollouts():
            (attempt,) = store.runs.attempts(rollout.id)
            assert attempt.findings == ()
            assert "check_s" in attempt.timings
            logs, tree = store.runs.logs(attempt.id), build(store.calls.of_attempt(attempt.id))
            (name,) = [name for name in logs if name.startswith("session/")]
            lines = logs[name].splitlines(keepends=True)
            last = next(n for n in reversed(range(len(lines))) if json.loads(lines[n])["type"] == "assistant")
            cut = {**logs, name: b"".join(lines[:last])}
            (finding,) = compare_session_log(cut, tree, cut_off=False)
            assert finding.call_id == tree.nodes[-1].call.id
            assert compare_session_log(cut, tree, cut_off=True) == []
            changed = {**logs, name: logs[name].replace(b'"type":"text","text":"', b'"type":"text","text":"not ')}
            assert compare_session_log(changed, tree, cut_off=False)
