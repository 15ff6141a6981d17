"""Real agents in container images that have no Node.js, and none of the agents: what they need is mounted.

What is passed into a run, such as MCP servers, works there too.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from understudy.sandbox.docker.sandboxes import DockerSandboxes
from understudy.store import Store
from understudy.tasks.environment import TaskEnvironment
from understudy.tasks.records import dump

from fakes.turns import ChatModel, bash, say, tool
from fakes.vllm import Say
from support import understudy
from support.agents import AFTER, AGENTS, FILE, AgentRig, require_agent
from support.docker_engine import Engine, bare_image
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


@pytest.mark.parametrize("agent", ["claude-code", *AGENTS, "openhands"])
async def test_an_image_needs_neither_python_nor_node(agent: str, engine: Engine, tmp_path: Path) -> None:
    require_agent(agent)
    sandboxes = DockerSandboxes(image=bare_image(engine), pull_wait_s=0.01)
    try:
        rig = AgentRig(agent, tmp_path, sandboxes, TaskEnvironment())
        path = f"/workspace/{FILE}"
        programs = rig.tools.shell("command -v python3 node || echo nei''ther")
        run = await rig.run(
            Say(text="I look.", tools=[rig.call("a", programs), rig.call("b", rig.tools.read(path))]),
            Say(text="I mend.", tools=[rig.call("c", rig.tools.edit(path))]),
            rig.done(),
        )
    finally:
        await sandboxes.aclose()
    assert (run.result.outcome, run.file, run.findings) == ("completed", AFTER, []), run.result.message
    assert "neither" in run.results()[0]


SERVER = """
import json, os, sys
for line in sys.stdin:
    asked = json.loads(line)
    result = {
        "initialize": {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}},
                       "serverInfo": {"name": "probe", "version": "1"}},
        "tools/list": {"tools": [{"name": "look", "inputSchema": {"type": "object"}}]},
        "tools/call": {"content": [{"type": "text", "text": f"{os.environ['PROBE']} in {os.getcwd()}: "
                                                            f"{os.path.exists('calc.py')}"}]},
    }.get(asked["method"])
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result or {}}), flush=True)
"""


@pytest.mark.usefixtures("claude_code")
@pytest.mark.parametrize("method", ["cli", "python"])
async def test_servers_settings_and_skills_work_in_a_container(
    method: str, engine: Engine, tmp_path: Path
) -> None:
    task = calc_instance(engine, 9)
    dump([task], tmp_path / "tasks.jsonl")
    server = {"command": "python", "args": ["-c", SERVER], "env": {"PROBE": "asked"}}
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": {"probe": server}}))
    hook = {"matcher": "mcp__probe__look", "hooks": [{"type": "command", "command": "echo seen >> hook.txt"}]}
    settings = {"permissions": {"deny": ["Bash(curl *)"]}, "hooks": {"PostToolUse": [hook]}}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    skill = tmp_path / "skills" / "mend" / "SKILL.md"
    skill.parent.mkdir(parents=True)
    skill.write_text("---\nname: mend\ndescription: How we mend here\n---\nMend it so.")
    async with ChatModel() as model:
        model.play.lanes[task.instruction] = [
            say("", tool("mcp__probe__look")),
            say("", bash("curl host")),
            say("", tool("Skill", skill="mend")),
            say("", bash("sed -i 's/return x - 10/return x + 10/' calc.py; cat hook.txt; rm hook.txt")),
            say("Done."),
        ]
        done = await asyncio.to_thread(
            understudy, "run", "vllm", "--backend-model-high", "fake", "--base-url", model.url, "--dataset-path",
            tmp_path / "tasks.jsonl", "-o", tmp_path / "out", "--run-method", method, "--sandbox", "docker",
            "--mcp-config", tmp_path / "mcp.json", "--settings", tmp_path / "settings.json",
            "--skills", tmp_path / "skills", "--json",
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["solved"] == 1, done.stdout
    with Store.open(tmp_path / "out", create=False) as store:
        (rollout,) = store.runs.rollouts()
        (attempt,) = store.runs.attempts(rollout.id)
        shown = json.loads([*store.calls.of_attempt(attempt.id)][-1].request)["messages"]
    assert attempt.findings == ()
    results = [json.dumps(block) for message in shown for block in message["content"] if "tool_use_id" in block]
    assert "asked in /testbed: True" in results[0]
    assert "has been denied" in results[1]
    assert "Mend it so." in json.dumps(shown)
    assert "seen" in results[3]


@pytest.mark.usefixtures("claude_code")
@pytest.mark.parametrize("method", ["cli", "python"])
def test_a_server_that_its_image_lacks_is_an_infrastructure_failure(
    method: str, engine: Engine, tmp_path: Path
) -> None:
    dump([calc_instance(engine, 9)], tmp_path / "tasks.jsonl")
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": {"probe": {"command": "no-such-program"}}}))
    done = understudy(
        "run", "embedded", "--policy", "oracle", "--tasks", tmp_path / "tasks.jsonl", "-o", tmp_path / "out",
        "--sandbox", "docker", "--run-method", method, "--mcp-config", tmp_path / "mcp.json", "--json",
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["solved"], summary["unsolved"], summary["infrastructure_failures"]) == (0, 0, 1)
    (failure,) = summary["failures"]
    assert "MCP servers that did not start: probe" in failure and "no-such-program" in failure
