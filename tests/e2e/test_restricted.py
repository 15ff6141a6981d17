"""Claude Code with other tools, prompts, settings, servers and skills than it has by itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from understudy.cli.agent_files import option_text
from understudy.sandbox.base import Sandboxes
from understudy.store import Store
from understudy.tasks.environment import TaskEnvironment
from understudy.tasks.records import dump
from understudy.trajectory.tree import build

from fakes.vllm import Say
from support import calc_task, understudy
from support.agents import AFTER, BEFORE, FILE, AgentRig

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

METHODS = ["cli", "python"]
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
import json, os, sys
for line in sys.stdin:
    asked = json.loads(line)
    result = {
        "initialize": {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}},
                       "serverInfo": {"name": "probe", "version": "1"}},
        "tools/list": {"tools": [{"name": "look", "inputSchema": {"type": "object"}}]},
        "tools/call": {"content": [{"type": "text", "text": f"what the server says {os.environ.get('PROBE')}"}]},
    }.get(asked["method"])
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result or {}}), flush=True)
"""


def mcp_config(program: str, *arguments: str) -> str:
    return json.dumps({"mcpServers": {"probe": {"command": program, "args": arguments}}})


def hook(command: str) -> list[dict[str, object]]:
    return [{"hooks": [{"type": "command", "command": command}]}]


def test_mcp_servers_settings_and_skills_reach_the_agent(calc_tasks: Path, tmp_path: Path) -> None:
    (tmp_path / "mcp.json").write_text(mcp_config("python3", "-c", SERVER))
    settings = {
        "permissions": {"deny": ["NotebookEdit"]},
        "hooks": {"SessionStart": hook("echo words of a hook")},
    }
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    skill = tmp_path / "skills" / "mend" / "SKILL.md"
    skill.parent.mkdir(parents=True)
    skill.write_text("---\nname: mend\ndescription: How we mend here\n---\nMend.")
    done = understudy(
        "run", "embedded", "--policy", "idle", "--tasks", calc_tasks, "--limit", "1", "-o", tmp_path / "out",
        "--mcp-config", tmp_path / "mcp.json", "--settings", tmp_path / "settings.json",
        "--skills", tmp_path / "skills", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with Store.open(tmp_path / "out", create=False) as store:
        (rollout,) = store.runs.rollouts()
        (attempt,) = store.runs.attempts(rollout.id)
        requests = [json.loads(call.request) for call in store.calls.of_attempt(attempt.id)]
    offered = {tool["name"] for request in requests for tool in request["tools"]}
    assert "mcp__probe__look" in offered
    assert "Bash" in offered and "NotebookEdit" not in offered
    assert "words of a hook" in json.dumps(requests[0]["messages"])
    assert "How we mend here" in json.dumps(requests[0]["messages"])


@pytest.mark.services
@pytest.mark.parametrize("method", METHODS)
def test_a_server_that_does_not_start_is_an_infrastructure_failure(
    method: str, calc_tasks: Path, tmp_path: Path
) -> None:
    (tmp_path / "mcp.json").write_text(mcp_config("python3", "-c", "import sys; sys.exit('no such table')"))
    done = understudy(
        "run", "embedded", "--policy", "oracle", "--tasks", calc_tasks, "--limit", "1", "-o", tmp_path / "out",
        "--run-method", method, "--mcp-config", tmp_path / "mcp.json", "--json",
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["solved"], summary["unsolved"], summary["infrastructure_failures"]) == (0, 0, 1)
    (failure,) = summary["failures"]
    assert "MCP servers that did not start: probe" in failure and "no such table" in failure


@pytest.fixture
def rig(claude_code: Path, tmp_path: Path, sandboxes: Sandboxes, environment: TaskEnvironment) -> AgentRig:
    return AgentRig("claude-code", tmp_path, sandboxes, environment)


@pytest.mark.services
@pytest.mark.parametrize("method", METHODS)
async def test_tools_of_servers_hooks_rules_and_skills_take_effect(
    method: str, rig: AgentRig, tmp_path: Path
) -> None:
    context = {"hookSpecificOutput": {"hookEventName": "PostToolUse", "additionalContext": "words of a hook"}}
    settings = {
        "permissions": {"deny": ["Bash(curl *)"]},
        "hooks": {"PostToolUse": [{"matcher": "Read", **hook(f"echo '{json.dumps(context)}'")[0]}]},
    }
    skill = tmp_path / "skills" / "mend"
    skill.mkdir(parents=True)
    (skill / "SKILL.md").write_text("---\nname: mend\ndescription: d\n---\nMend it so.")
    (skill / "tool.sh").write_text("#!/bin/sh\necho a program of the skill\n")
    (skill / "tool.sh").chmod(0o755)
    calls = [
        ("mcp__probe__look", {}),
        rig.tools.shell("curl host"),
        rig.tools.read(f"/workspace/{FILE}"),
        ("Skill", {"skill": "mend"}),
        rig.tools.shell("~/.claude/skills/mend/tool.sh"),
    ]
    # It starts slowly, and no request goes out before it is there.
    slow = json.loads(mcp_config("sh", "-c", 'sleep 7; exec python3 -c "$0"', SERVER))
    slow["mcpServers"]["probe"]["env"] = {"PROBE": "of its environment"}
    run = await rig.run(
        *(Say(tools=[rig.call(str(number), call)]) for number, call in enumerate(calls)),
        rig.done(),
        options={
            "run_method": method,
            "mcp_config": json.dumps(slow),
            "settings": json.dumps(settings),
            "skills": option_text("skills", tmp_path / "skills"),
        },
    )
    assert (run.result.outcome, run.findings) == ("completed", [])
    assert "mcp__probe__look" in [tool["function"]["name"] for tool in run.seen[0]["tools"]]
    served, denied, _, _, program = run.results()
    assert "what the server says of its environment" in served
    assert "Permission to use Bash with command curl host has been denied" in denied
    assert "a program of the skill" in program
    assert all(text in json.dumps(run.seen[-1]) for text in ("words of a hook", "Mend it so."))


@pytest.mark.services
async def test_settings_choose_plan_mode_and_may_switch_hooks_off(rig: AgentRig) -> None:
    path = f"/workspace/{FILE}"
    settings = {"permissions": {"defaultMode": "plan"}, "disableAllHooks": True}
    run = await rig.run(
        Say(tools=[rig.call("a", rig.tools.read(path))]),
        Say(tools=[rig.call("b", rig.tools.edit(path))]),
        rig.done("The plan."),
        options={"settings": json.dumps(settings)},
    )
    # Its log is found although no hook tells where it is.
    assert (run.result.outcome, run.findings) == ("completed", [])
    assert "while in plan mode" in run.results()[1]
    assert run.file == BEFORE


@pytest.mark.services
async def test_a_plan_is_approved_and_carried_out(rig: AgentRig) -> None:
    path = f"/workspace/{FILE}"
    settings = {"permissions": {"defaultMode": "plan", "deny": ["Bash(curl *)"]}}
    run = await rig.run(
        Say(tools=[rig.call("read", rig.tools.read(path))]),
        Say(tools=[rig.call("early", rig.tools.edit(path))]),
        Say(tools=[rig.call("plan", ("ExitPlanMode", {"plan": "Raise x."}))]),
        Say(tools=[rig.call("edit", rig.tools.edit(path)), rig.call("rm", rig.tools.shell("rm -f x; echo on"))]),
        Say(tools=[rig.call("curl", rig.tools.shell("curl host"))]),
        rig.done(),
        options={"run_method": "python", "settings": json.dumps(settings)},
    )
    assert (run.result.outcome, run.findings) == ("completed", []), run.result.message
    assert "ExitPlanMode" in [tool["function"]["name"] for tool in run.seen[0]["tools"]]
    _, early, plan, _, removed, denied = run.results()
    assert "not permitted while in plan mode" in early and "approved" in plan
    assert "on" in removed and "has been denied" in denied
    assert run.file == AFTER
    assert [node.role for node in build(run.calls).nodes] == ["main"] * 6


@pytest.mark.services
async def test_a_subagent_has_a_branch_and_a_log_of_its_own(rig: AgentRig) -> None:
    task = {"description": "Look", "prompt": "Print it.", "subagent_type": "general-purpose"}
    run = await rig.run(
        Say(tools=[rig.call("a", ("Agent", task))]),
        Say(tools=[rig.call("b", rig.tools.shell("echo printed"))]),
        Say(text="It is printed."),
        rig.done(),
    )
    assert (run.result.outcome, run.findings) == ("completed", [])
    assert [node.role for node in build(run.calls).nodes] == ["main", "subagent", "subagent", "main"]
    assert "It is printed." in run.results()[0]
    assert any("/subagents/" in name for name in run.result.logs)


@pytest.mark.parametrize("missing", ["nothing", "no-skill"])
def test_a_directory_without_skills_is_refused(missing: str, calc_tasks: Path, tmp_path: Path) -> None:
    (tmp_path / "no-skill" / "name").mkdir(parents=True)
    options = ("--skills", tmp_path / missing)
    done = understudy("run", "--policy", "idle", "--tasks", calc_tasks, "-o", tmp_path / "out", *options)
    assert done.returncode == 2, done.stderr
    assert "has no skills, expected a directory with a file NAME/SKILL.md for each" in done.stderr


@pytest.mark.parametrize("content", [None, "[]", "{"])
def test_an_invalid_file_of_settings_is_refused(content: str | None, calc_tasks: Path, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "settings.json").write_text(content)
    options = ("--settings", tmp_path / "settings.json")
    done = understudy("run", "--policy", "idle", "--tasks", calc_tasks, "-o", tmp_path / "out", *options)
    assert done.returncode == 2, done.stderr
    assert "--settings" in done.stderr and "JSON object" in done.stderr
