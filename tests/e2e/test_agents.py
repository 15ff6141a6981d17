"""The real agents of registries in a sandbox without network before the gateway.

They are fetched from their registries where they are missing, as `understudy setup --agent NAME` does.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from understudy.sandbox import process
from understudy.sandbox.base import Sandboxes
from understudy.sandbox.time_limit import TimeLimit
from understudy.tasks.environment import TaskEnvironment

from fakes.vllm import Hang, Refuse, Say
from support.agents import AFTER, AGENTS, BEFORE, FILE, AgentRig, require_agent

pytestmark = [pytest.mark.e2e, pytest.mark.services]

LONG = "seq 1 200000"


@pytest.fixture(params=AGENTS)
def rig(
    request: pytest.FixtureRequest, tmp_path: Path, sandboxes: Sandboxes, environment: TaskEnvironment
) -> AgentRig:
    require_agent(request.param)
    return AgentRig(request.param, tmp_path, sandboxes, environment)


@pytest.mark.parametrize("streaming", [False, True], ids=["atomic", "streaming"])
async def test_it_reads_edits_and_ends(rig: AgentRig, streaming: bool) -> None:
    path = f"/workspace/{FILE}"
    run = await rig.run(
        Say(text="I look.", tools=[rig.call("a", rig.tools.read(path))]),
        Say(text="I mend.", tools=[rig.call("b", rig.tools.edit(path))]),
        rig.done(),
        streaming=streaming,
    )
    assert (run.result.outcome, run.result.exit_code, run.result.message) == ("completed", 0, "")
    assert run.file == AFTER
    assert [call.status for call in run.work] == ["ok"] * 3
    assert BEFORE.strip() in run.results()[0]
    # Each conversation begins with all of the one before, and the tools stay the same.
    for shorter, longer in zip(run.seen, run.seen[1:], strict=False):
        assert longer["messages"][: len(shorter["messages"])] == shorter["messages"]
        assert longer["tools"] == shorter["tools"]
    assert any(name.startswith("session/") for name in run.result.logs)
    assert run.findings == [], "its own log is not what it was answered"


INSTRUCTION = (
    f"/init it for user@host.org.\n\n\tUse `@property`,  @{FILE} and\n@calc\n!ls\n#x $& $$1 {{{{ x }}}} \\@ ü"
)
"""What agents take for commands, files, shell commands, notes and templates where a user enters it."""


async def test_the_model_is_shown_the_instruction_unchanged(rig: AgentRig) -> None:
    run = await rig.run(rig.done(), instruction=INSTRUCTION)
    assert run.result.outcome == "completed", run.result.message
    contents = [message["content"] for message in run.seen[0]["messages"] if message["role"] == "user"]
    shown = [part if isinstance(part, str) else part["text"] for content in contents for part in as_parts(content)]
    assert any(INSTRUCTION in text for text in shown), shown
    assert not any(BEFORE.strip() in text for text in shown), "a file is added"


def as_parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [content]


async def test_parallel_tools_come_back_in_their_order(rig: AgentRig) -> None:
    calls = [rig.call(str(number), rig.tools.shell(f"echo number-{number}")) for number in range(3)]
    run = await rig.run(Say(text="Three.", tools=calls), rig.done())
    assert run.result.outcome == "completed"
    assert [f"number-{number}" in result for number, result in enumerate(run.results())] == [True] * 3


async def test_a_command_that_fails_and_a_long_output(rig: AgentRig) -> None:
    run = await rig.run(
        Say(text="Fail.", tools=[rig.call("a", rig.tools.shell("echo broken >&2; exit 3"))]),
        Say(text="Much.", tools=[rig.call("b", rig.tools.shell(LONG))]),
        rig.done(),
    )
    assert run.result.outcome == "completed"
    failed, long = run.results()
    assert "broken" in failed
    assert 500 < len(long) < 200_000


async def test_passing_faults_are_waited_out(rig: AgentRig) -> None:
    run = await rig.run(
        Refuse(status=429, headers={"retry-after": "0"}),
        Refuse(status=500),
        Refuse(status=529),
        rig.done(),
    )
    assert run.result.outcome == "completed", run.result.message
    assert [call.status for call in run.work][-1] == "ok"
    assert len(run.work) >= 2


async def test_an_answer_that_broke_off_is_no_answer(rig: AgentRig) -> None:
    run = await rig.run(Say(text="Half of an answer", cut=2), rig.done("Whole."), streaming=True)
    # mini-swe-agent does not stream, so its answers come whole or not at all; two end with the error.
    gives_up = rig.name in ("pi", "qwen-code")
    ends = {"mini-swe-agent": ["ok", "ok"], "pi": ["error"], "qwen-code": ["error"]}
    assert [call.status for call in run.work] == ends.get(rig.name, ["error", "ok"])
    assert run.result.outcome == ("crashed" if gives_up else "completed"), run.result.message
    assert not gives_up or "broke off" in run.result.message


async def test_a_fault_that_stays_is_a_crash_and_says_why(rig: AgentRig) -> None:
    run = await rig.run(*[Refuse(status=400, message="this model has a cold")] * 12)
    assert run.result.outcome == "crashed"
    assert "a cold" in run.result.message or "400" in run.result.message
    assert run.file == BEFORE


async def test_an_agent_that_is_stopped_keeps_its_work_and_its_logs(
    rig: AgentRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang, timeout_s = Hang(), 300.0

    def limit(seconds: float) -> TimeLimit:
        """A limit whose time is over once the model hangs."""
        return TimeLimit(seconds, clock=lambda: time.monotonic() + timeout_s * hang.asked.is_set())

    monkeypatch.setattr(process, "TimeLimit", limit)
    run = await rig.run(
        Say(text="I mend.", tools=[rig.call("b", rig.tools.read(f"/workspace/{FILE}"))]),
        Say(text="I mend.", tools=[rig.call("c", rig.tools.edit(f"/workspace/{FILE}"))]),
        hang,
        timeout_s=timeout_s,
    )
    assert (run.result.outcome, run.result.exit_code) == ("timeout", None)
    assert run.file == AFTER
    assert any(name.startswith("session/") for name in run.result.logs)


async def test_it_takes_no_more_turns_than_it_may(rig: AgentRig) -> None:
    steps = [
        Say(text="On.", tools=[rig.call(str(number), rig.tools.shell(f"echo {number}"))]) for number in range(9)
    ]
    run = await rig.run(*steps, max_turns=3)
    assert run.result.outcome in ("completed", "max_turns")
    assert len(run.seen) <= 4


TOOLS = {
    "gemini": {"read_file", "replace"},
    "opencode": {"read", "bash"},
    "pi": {"read", "edit"},
    "qwen-code": {"read_file", "edit"},
}
"""Some tools of the agents whose tools can be chosen."""


async def test_a_system_prompt_in_the_place_of_its_own_and_only_these_tools(rig: AgentRig) -> None:
    prompt = "You mend files. {{ curly }} 'quotes' \"and\" more."
    tools = TOOLS.get(rig.name, set())
    options = {"system_prompt": prompt} | ({"tools": ",".join(tools)} if tools else {})
    run = await rig.run(rig.done(), options=options)
    assert run.result.outcome == "completed", run.result.message
    (first, *_) = run.seen[0]["messages"]
    assert first["role"] == "system" and prompt in first["content"]
    assert "best coding agent" not in first["content"]
    offered = sorted(tool["function"]["name"] for tool in run.seen[0]["tools"])
    assert not tools or offered == sorted(tools)
