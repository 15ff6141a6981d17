"""Claude Code with few tools and another system prompt, as models that read little need it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from understudy.store import Store
from understudy.tasks.records import dump

from support import calc_task, understudy

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

PROMPT = "-- You mend “programs”.\nRead, then edit."


@pytest.mark.parametrize("method", ["cli", "python"])
def test_only_the_tools_and_the_prompt_that_were_asked_for_reach_the_model(method: str, tmp_path: Path):
    dump([calc_task()], tmp_path / "tasks.jsonl")
    done = understudy(
        "run", "embedded", "--policy", "oracle", "--tasks", tmp_path / "tasks.jsonl", "-o", tmp_path / "out",
        "--run-method", method, "--tools", "Read, Edit", "--system-prompt", PROMPT, "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["solved"] == 1, done.stdout
    with Store.open(tmp_path / "out", create=False) as store:
        (rollout,) = store.runs.rollouts()
        (attempt,) = store.runs.attempts(rollout.id)
        calls = [*store.calls.of_attempt(attempt.id)]
    assert attempt.findings == ()
    for call in calls:
        asked = json.loads(call.request)
        assert [tool["name"] for tool in asked["tools"]] == ["Edit", "Read"]
        said = "\n".join(block["text"] for block in asked["system"])
        assert PROMPT in said
        # Claude Code's own is above 5,000 characters.
        assert len(said) < 1000
    # What is trained on is short: a prompt of a few hundred tokens beside the schemas of two tools.
    assert 0 < calls[0].usage.prompt_tokens < 4000


def test_another_restriction_is_another_run(calc_tasks: Path, tmp_path: Path):
    """A run goes on with the same options only: an agent with other tools is another agent."""
    way = ("run", "--policy", "idle", "--tasks", calc_tasks, "--limit", "1", "-o", tmp_path / "out", "--json")
    runs = []
    for tools in ("Read", "Read,Edit", "Read,Edit"):
        done = understudy(*way, "--tools", tools)
        assert done.returncode == 0, done.stderr
        runs.append(json.loads(done.stdout)["run_id"])
    assert runs[0] != runs[1] == runs[2]
