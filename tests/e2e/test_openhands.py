"""The real OpenHands in a sandbox without network before the gateway.

Few runs with many behaviours each, because every start of it imports for seconds.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from understudy.sandbox.base import Sandboxes
from understudy.tasks.environment import TaskEnvironment

from fakes.vllm import Refuse, Say
from support.agents import AFTER, BEFORE, FILE, AgentRig, require_agent
from support.ingest import only

pytestmark = [pytest.mark.e2e, pytest.mark.services]

PATH = f"/workspace/{FILE}"


@pytest.fixture
def rig(tmp_path: Path, sandboxes: Sandboxes, environment: TaskEnvironment) -> AgentRig:
    require_agent("openhands")
    return AgentRig("openhands", tmp_path, sandboxes, environment)


async def test_it_reads_edits_runs_and_ends(rig: AgentRig, tmp_path: Path) -> None:
    shell = rig.tools.shell
    run = await rig.run(
        Say(text="I look.", tools=[rig.call("look", rig.tools.read(PATH))]),
        Say(text="I mend.", tools=[rig.call("mend", rig.tools.edit(PATH))]),
        Say(text="Eight.", tools=[rig.call(f"n{n}", shell(f"echo number-{n}")) for n in range(8)]),
        Say(tools=[rig.call("fail", shell("sh -c 'echo broken; exit 3'"))]),
        Say(text="Much.", tools=[rig.call("much", shell("seq 1 50000"))]),
        Say(tools=[rig.call("unknown", ("no_such_tool", {"x": 1}))]),
        Say(tools=[rig.call("missing", ("terminal", {}))]),
        Say(text="„ü“ 🙂", tools=[rig.call("finish", ("finish", {"message": "Mended."}))]),
    )
    assert (run.result.outcome, run.result.exit_code, run.result.message) == ("completed", 0, "")
    assert run.file == AFTER
    assert [call.status for call in run.calls] == ["ok"] * 8
    # Each conversation begins with all of the one before, and the tools stay the same.
    for shorter, longer in zip(run.seen, run.seen[1:], strict=False):
        assert longer["messages"][: len(shorter["messages"])] == shorter["messages"]
        assert longer["tools"] == shorter["tools"]
    look, mend, *commands, failed, much, unknown, missing = run.results()
    assert BEFORE.strip() in look and "has been edited" in mend
    assert len(commands) == 8
    assert all(f"number-{n}" in result for n, result in enumerate(commands)) and "broken" in failed
    assert not any("truncated" in result for result in commands), "more was read than the command's own output"
    assert len(much) < 60_000
    assert "not found" in unknown and "Field required" in missing
    assert not any("\\u001b" in result for result in run.results()), "control sequences of the terminal"
    assert run.findings == [], "its own log is not what it was answered"
    events = {name: log for name, log in run.result.logs.items() if name.endswith(".json")}  # without its locks
    for name, content in events.items():
        path = tmp_path / "logs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    trace, states = only(tmp_path / "logs" / "session")
    assert (trace.format, len(states)) == ("openhands-v1", 8)


async def test_faults_that_pass_are_waited_out_and_settings_hold(rig: AgentRig) -> None:
    prompt = "You mend files. {{ curly }} 'quotes' \"and\" more."
    run = await rig.run(
        Refuse(status=429, headers={"retry-after": "0"}),
        Refuse(status=500),
        Refuse(status=529),
        rig.done(),
        options={"system_prompt": prompt, "tools": "terminal,finish"},
    )
    assert run.result.outcome == "completed", run.result.message
    (first, *_) = run.seen[0]["messages"]
    assert first["role"] == "system" and first["content"].startswith(prompt)
    assert [tool["function"]["name"] for tool in run.seen[0]["tools"]] == ["terminal", "finish"]


async def test_a_fault_that_stays_is_a_crash_and_says_why(rig: AgentRig) -> None:
    run = await rig.run(*[Refuse(status=400, message="this model has a cold")] * 12)
    assert run.result.outcome == "crashed"
    assert "a cold" in run.result.message
    assert run.file == BEFORE


async def test_it_takes_no_more_turns_than_it_may(rig: AgentRig) -> None:
    steps = [Say(text="On.", tools=[rig.call(str(n), rig.tools.shell(f"echo {n}"))]) for n in range(9)]
    run = await rig.run(*steps, max_turns=3)
    assert (run.result.outcome, len(run.seen)) == ("max_turns", 3)
