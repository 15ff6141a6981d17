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


@pytest.mark.parametrize("method", ["cli", pytest.param("python", marks=pytest.mark.services)])
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
        request = json.loads(call.request)
        assert [tool["name"] for tool in request["tools"]] == ["Edit", "Read"]
        system_prompt = "\n".join(block["text"] for block in request["system"])
        assert PROMPT in system_prompt
        # Claude Code's own is above 5,000 characters.
        assert len(system_prompt) < 1000
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


SERVER = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    result = {
        "initialize": {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}},
                       "serverInfo": {"name": "probe", "version": "1"}},
        "tools/list": {"tools": [{"name": "look", "inputSchema": {"type": "object"}}]},
    }.get(asked["method"])
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result or {}}), flush=True)
"""


def test_mcp_servers_and_settings_reach_the_agent(calc_tasks: Path, tmp_path: Path) -> None:
    servers = {"mcpServers": {"probe": {"command": "python3", "args": ["-c", SERVER]}}}
    (tmp_path / "mcp.json").write_text(json.dumps(servers))
    (tmp_path / "settings.json").write_text(json.dumps({"permissions": {"deny": ["NotebookEdit"]}}))
    done = understudy(
        "run", "embedded", "--policy", "idle", "--tasks", calc_tasks, "--limit", "1", "-o", tmp_path / "out",
        "--mcp-config", tmp_path / "mcp.json", "--settings", tmp_path / "settings.json", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with Store.open(tmp_path / "out", create=False) as store:
        (rollout,) = store.runs.rollouts()
        (attempt,) = store.runs.attempts(rollout.id)
        offered = {
            tool["name"]
            for call in store.calls.of_attempt(attempt.id)
            for tool in json.loads(call.request)["tools"]
        }
    assert "mcp__probe__look" in offered
    assert "Bash" in offered and "NotebookEdit" not in offered


@pytest.mark.parametrize("content", [None, "[]", "{"])
def test_an_invalid_file_of_settings_is_refused(content: str | None, calc_tasks: Path, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "settings.json").write_text(content)
    options = ("--settings", tmp_path / "settings.json")
    done = understudy("run", "--policy", "idle", "--tasks", calc_tasks, "-o", tmp_path / "out", *options)
    assert done.returncode == 2, done.stderr
    assert "--settings" in done.stderr and "JSON object" in done.stderr
