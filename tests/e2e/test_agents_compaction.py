"""Compactions that real agents make by themselves: nothing sampled is lost, and their logs have the same turns.

`understudy agents try` tries them too, with a model that has no tokens.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from understudy.agents.packages import AGENT_PACKAGES
from understudy.sandbox.base import Sandboxes
from understudy.tasks.environment import TaskEnvironment
from understudy.trajectory.samples import merge
from understudy.trajectory.tree import build
from understudy.types import WORK_ROLES

from fakes.vllm import Say
from support.agents import AFTER, FILE, AgentRig, require_agent

pytestmark = [pytest.mark.e2e, pytest.mark.services]

PATH = f"/workspace/{FILE}"
LONG = "seq -f 'line %g of a long output' 1 1500"
SHORT = "echo short"
FULL = {"qwen-code": 176_000}
"""Reported lengths of a prompt after which agents compact; 990,000 for the others.

Qwen Code takes a model that it does not know to have a context of 200,000 tokens. It compacts shortly before
177,000. What it estimates of the summarised prompt is the reported length less what the summary saved; above
177,000 it would ask for nothing more. Results that are short leave room to ask for the summary with all tools.
"""


@pytest.mark.parametrize("agent", ["codex", "opencode", "pi", "qwen-code"])
async def test_both_sides_of_a_compaction_are_trained_on_whole(
    agent: str, tmp_path: Path, sandboxes: Sandboxes, environment: TaskEnvironment
) -> None:
    require_agent(agent)
    rig = AgentRig(agent, tmp_path, sandboxes, environment)
    commands = [SHORT] if agent == "qwen-code" else [LONG] * 4
    lists = [rig.call(f"long-{number}", rig.tools.shell(each)) for number, each in enumerate(commands)]
    usage = {"prompt_tokens": FULL.get(agent, 990_000), "completion_tokens": 10}
    run = await rig.run(
        Say(text="I look.", tools=[rig.call("look", rig.tools.read(PATH))]),
        Say(text="I mend.", tools=[rig.call("mend", rig.tools.edit(PATH))]),
        Say(text="I list.", tools=lists, extra={"usage": usage}),
        Say(text="I go on.", tools=[rig.call("on", rig.tools.shell("echo on"))]),
        rig.done(),
    )
    assert (run.result.outcome, run.file) == ("completed", AFTER), run.result.message
    assert run.findings == [], f"the log of {AGENT_PACKAGES[agent].title} is not what it was answered"
    tree = build(run.calls)
    (summary,) = [node for node in tree.nodes if node.role == "compaction"]
    work = [node for node in tree.nodes if node.role in WORK_ROLES]
    assert [node.continues for node in work] == [None] * 3 + [summary, None]
    # Qwen Code puts its notes before the summary once more, with the second request after it.
    last = "history rewritten" if agent == "qwen-code" else None
    assert [node.origin for node in work[1:]] == [None, None, "compaction", last]
    sampled = sum(len(node.call.completion_token_ids or ()) for node in work)
    trained = sum(sum(segment.loss_mask) for segment in merge(tree, WORK_ROLES).segments)
    assert trained == sampled > 0
