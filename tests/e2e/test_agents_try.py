"""Another version of an agent is fetched, does what the pinned one does, and the difference is said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from understudy.run.recording import read_records

from support import understudy
from support.agents import require_agent

pytestmark = [pytest.mark.e2e, pytest.mark.services, pytest.mark.usefixtures("isolation")]


CHOSEN = [
    "edit", "parallel tools", "failing command", "passing faults", "refusal", "turn limit", "many turns",
    "stream broken in a tool call", "context overflow", "subagent", "interruption", "resume after an interruption",
]  # fmt: skip


@pytest.mark.timeout(900)
def test_another_version_is_tried(tmp_path: Path) -> None:
    require_agent("claude-code")
    chosen = [part for name in CHOSEN for part in ("--behaviour", name)]
    done = understudy(
        "agents", "try", "claude-code@2.1.332", "--json", "--record", str(tmp_path), *chosen, timeout=800
    )
    assert done.returncode == 0, done.stderr or done.stdout
    report = json.loads(done.stdout)
    assert [trial["version"] for trial in report["trials"]] == ["2.1.197", "2.1.332"]
    assert report["problems"] == []
    assert all([each["behaviour"] for each in trial["observations"]] == CHOSEN for trial in report["trials"])
    assert "tool ToolSearch: new" in report["changes"]
    records = read_records(tmp_path / "claude-code.jsonl.xz")
    assert [(record.version, record.behaviour) for record in records] == [("2.1.332", name) for name in CHOSEN]
    assert all(record.exchanges for record in records)


@pytest.mark.parametrize("agent", ["opencode", "openhands", "pi", "qwen-code"])
def test_a_context_that_is_full_is_summarised(agent: str) -> None:
    """Each calculates by the lengths that the model reports, and puts the summary in a place of its own."""
    require_agent(agent)
    done = understudy("agents", "try", agent, "--behaviour", "context overflow", "--json", timeout=200)
    assert done.returncode == 0, done.stderr or done.stdout
    report = json.loads(done.stdout)
    assert report["problems"] == []
    (seen,) = report["trials"][0]["observations"]
    assert {"compaction", "main"} <= {*seen["roles"]}


def test_an_agent_is_interrupted_although_the_command_ignores_interrupts() -> None:
    """As in a background job of a shell, `nohup understudy agents try … &`."""
    require_agent("mini-swe-agent")
    done = subprocess.run(
        [
            "sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-m", "understudy",
            "agents", "try", "mini-swe-agent", "--behaviour", "interruption", "--json",
        ],
        stdout=subprocess.PIPE,
        timeout=280,
        check=False,
    )  # fmt: skip
    report = json.loads(done.stdout)
    assert report["problems"] == []
    assert report["trials"][0]["observations"][0]["outcome"] == "crashed"


def test_a_behaviour_that_is_not_there_is_an_error() -> None:
    done = understudy("agents", "try", "mini-swe-agent", "--behaviour", "subagent")
    assert done.returncode == 2
    assert "unknown behaviour 'subagent' of mini-swe-agent; give one of: edit, " in done.stderr


def test_a_version_that_is_not_there_is_an_error() -> None:
    require_agent("codex")
    done = understudy("agents", "try", "codex@0.0.1")
    assert done.returncode == 2
    assert "npm could not download Codex 0.0.1" in done.stderr and "give a version that npm has" in done.stderr
