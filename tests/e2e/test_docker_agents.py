"""Real agents in container images that have no Node.js, and none of the agents: what they need is mounted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from understudy.tasks.records import dump

from support import understudy
from support.agents import AGENTS, require_agent
from support.docker_engine import Engine
from support.grading import calc_instance

pytestmark = [pytest.mark.services, pytest.mark.e2e]


@pytest.mark.parametrize("agents", [AGENTS, ("openhands",)], ids=["agents", "openhands"])
def test_each_agent_solves_a_task_in_a_container(agents: tuple[str, ...], engine: Engine, tmp_path: Path) -> None:
    for agent in agents:
        require_agent(agent)
    dump([calc_instance(engine, 9)], tmp_path / "tasks.jsonl")
    chosen = [word for agent in agents for word in ("--agent", agent)]
    done = understudy(
        "run", "embedded", "--policy", "oracle", "--tasks", tmp_path / "tasks.jsonl", *chosen,
        "--sandbox", "docker", "--output-dir", tmp_path / "out", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summaries = [json.loads(line) for line in done.stdout.splitlines()]
    assert [summary["solved"] for summary in summaries] == [1] * len(agents)
