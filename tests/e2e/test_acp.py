"""Real agents that speak the Agent Client Protocol, in a sandbox before the gateway."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from understudy.gateway.keys import PREFIX
from understudy.sandbox.base import Sandboxes
from understudy.tasks.environment import TaskEnvironment
from understudy.trajectory.tree import build
from understudy.types import WORK_ROLES

from fakes.vllm import Refuse, Say
from support.agents import AFTER, BEFORE, FILE, AgentRig, require_agent

pytestmark = [pytest.mark.e2e, pytest.mark.services]


COMMANDS = ("gemini --acp --model big", "opencode acp", "qwen-code --acp")


@pytest.fixture(params=COMMANDS)
def rig(
    request: pytest.FixtureRequest, tmp_path: Path, sandboxes: Sandboxes, environment: TaskEnvironment
) -> AgentRig:
    require_agent(request.param.split()[0])
    return AgentRig(f"acp:{request.param}", tmp_path, sandboxes, environment)


async def test_it_reads_edits_and_ends(rig: AgentRig) -> None:
    path = f"/workspace/{FILE}"
    run = await rig.run(
        Say(text="I look.", tools=[rig.call("a", rig.tools.read(path))]),
        Say(text="I mend.", tools=[rig.call("b", rig.tools.edit(path))]),
        Say(text="I try.", tools=[rig.call("c", rig.tools.shell("echo one; exit 3"))]),
        rig.done(),
    )
    assert (run.result.outcome, run.result.exit_code, run.result.message) == ("completed", 0, "")
    assert run.file == AFTER
    assert BEFORE.strip() in run.results()[0]
    assert "one" in run.results()[2]
    assert [call.status for call in run.work] == ["ok"] * 4
    work = [node for node in build(run.calls).nodes if node.role in WORK_ROLES]
    assert [node.branch for node in work] == ["main"] * 4, "what is not the work is taken for it"
    assert run.findings == []
    assert not any(PREFIX.encode() in log for log in run.result.logs.values())


@pytest.mark.parametrize("command", COMMANDS)
async def test_the_model_is_shown_the_instruction_unchanged(
    command: str, tmp_path: Path, sandboxes: Sandboxes, environment: TaskEnvironment
) -> None:
    """Files and templates that it names are not read. Only a command at its beginning would be executed."""
    require_agent(command.split()[0])
    instruction = f"For user@host.org.\n\n\tUse `@property`,  @{FILE} and\n@calc\n!ls\n/init $& {{{{ x }}}} \\@ ü"
    rig = AgentRig(f"acp:{command}", tmp_path, sandboxes, environment)
    run = await rig.run(rig.done(), instruction=instruction)
    assert run.result.outcome == "completed", run.result.message
    shown = json.dumps([message["content"] for message in run.seen[0]["messages"] if message["role"] == "user"])
    assert json.dumps(instruction)[1:-1] in shown
    assert BEFORE.strip() not in shown, "a file is added"


async def test_a_log_of_its_own_is_compared(
    tmp_path: Path, sandboxes: Sandboxes, environment: TaskEnvironment
) -> None:
    require_agent("qwen-code")
    rig = AgentRig("acp:qwen-code --acp", tmp_path, sandboxes, environment)
    look = rig.call("a", rig.tools.read(f"/workspace/{FILE}"))
    remove = rig.call("b", rig.tools.shell("rm -r ~/.qwen/projects"))
    run = await rig.run(Say(text="I look.", tools=[look]), Say(text="I remove it.", tools=[remove]), rig.done())
    assert run.result.outcome == "completed"
    assert any("the answer of call 0 is not in the log" in finding.message for finding in run.findings)


async def test_a_fault_that_stays_is_a_crash(rig: AgentRig) -> None:
    run = await rig.run(*[Refuse(status=400, message="this model has a cold")] * 12)
    if rig.name.startswith("acp:opencode"):
        # It ends its turn as if nothing had been: what it never got from the model is seen by the run.
        assert all(call.status == "error" for call in run.work)
        return
    assert run.result.outcome == "crashed"
    assert run.file == BEFORE


async def test_an_agent_that_hangs_is_stopped(rig: AgentRig) -> None:
    run = await rig.run(
        Say(text="Wait.", tools=[rig.call("a", rig.tools.shell("tail -f /dev/null"))]), timeout_s=25.0
    )
    assert run.result.outcome == "timeout"
