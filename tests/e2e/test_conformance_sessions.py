"""Claude Code over more than one process, agent or context window: every line of calls comes out as a branch."""

from __future__ import annotations

import asyncio
import json

import pytest

from fakes.turns import Fail, Tool, Turn, bash, say, tool
from support.cli import ATOMIC, MODEL, SESSION, WAYS, Rig, Way, in_ways
from support.conformance import Behaviour, play

pytestmark = pytest.mark.e2e

DONE = say("Done.")
SUMMARY = say("<analysis>x</analysis>\n<summary>SUMMARY OF SESSION</summary>")


def agent(task: str, kind: str = "general-purpose", **more: object) -> Tool:
    return tool("Agent", description="explore", prompt=f"{task} list the files", subagent_type=kind, **more)


SUB = [say("Sub looking.", bash("ls")), say("Subagent report: found 1 file.")]


@pytest.mark.parametrize(
    ("rig", "background"),
    [
        (ATOMIC, None),
        (Way("messages", streaming=True), None),
        pytest.param(Way("chat", streaming=True), None, marks=pytest.mark.services),
        pytest.param(Way("messages"), None, marks=pytest.mark.services),
        (ATOMIC, False),
        (ATOMIC, True),
    ],
    indirect=["rig"],
    ids=str,
)
async def test_subagents_are_branches_of_the_call_that_sent_them(rig: Rig, background: bool | None) -> None:
    more = {} if background is None else {"run_in_background": background}
    rig.script(
        say("Delegating.", agent("TASKONE", **more), agent("TASKTWO", "Explore", **more)),
        *[DONE] * 3,  # those in the background report one by one, or together
        TASKONE=SUB, TASKTWO=SUB,
    )  # fmt: skip
    run = await rig.claude()
    assert (run.result["is_error"], run.result["result"]) == (False, "Done.")
    main = [node for node in run.nodes if node.branch == "main"]
    subs = {node.branch: node for node in run.nodes if node.call.agent_id and node.parent is None}
    assert len(subs) == 2
    assert {node.role for node in main} == {"main"}
    for branch, first in subs.items():
        assert branch == first.call.agent_id
        assert (first.role, first.spawned_by) == ("subagent", main[0])
        assert [node.call.status for node in run.nodes if node.branch == branch] == ["ok", "ok"]
    assert {node.branch for node in run.nodes} == {"main", *subs}
    assert not any(node.superseded for node in run.nodes)
    # The CLI gives its Explore agents the small model of its own accord.
    assert {call.backend_model for call in run.calls if call.agent_id} == {"big", "small"}


async def test_a_subagent_of_the_small_model_is_answered_by_it(rig: Rig) -> None:
    rig.script(
        say("", agent("TASKONE", "general-purpose", model="haiku")), DONE, TASKONE=SUB,
    )  # fmt: skip
    run = await rig.claude(env={"CLAUDE_CODE_SUBAGENT_MODEL": "claude-haiku-4-5"})
    models = {(call.requested_model, call.backend_model) for call in run.calls}
    assert models == {(MODEL, "big"), ("claude-haiku-4-5", "small")}
    assert [body["model"] for body in run.model_requests] == ["big", "small", "small", "big"]


@pytest.mark.parametrize(
    "rig", [ATOMIC, pytest.param(Way("messages"), marks=pytest.mark.services)], indirect=True, ids=str
)
async def test_resumed_continued_and_forked_sessions_go_on_where_the_last_one_ended(rig: Rig) -> None:
    rig.script(
        Turn(thinking="t1", tools=[bash("echo a")]), say("first"), say("second"), say("third"), say("fourth")
    )
    assert (await rig.claude("one", "--session-id", SESSION)).result["result"] == "first"
    assert (await rig.claude("two", "--resume", SESSION)).result["result"] == "second"
    assert (await rig.claude("three", "--continue")).result["result"] == "third"
    forked = await rig.claude("four", "--resume", SESSION, "--fork-session")
    assert forked.result["result"] == "fourth"
    assert forked.result["session_id"] != SESSION
    nodes = rig.tree().nodes
    assert [node.parent for node in nodes] == [None, *nodes[:-1]]
    assert [node.branch for node in nodes] == ["main"] * 5


@pytest.mark.parametrize("rig", [ATOMIC, Way("messages", streaming=True)], indirect=True, ids=str)
async def test_one_process_with_several_turns(rig: Rig) -> None:
    rig.write({"a.py": "a - b\n"})
    rig.script(
        Turn(thinking="k1", tools=[tool("Read", file_path="a.py")]),
        say("read it"),
        Turn(thinking="k2", tools=[bash("sed -i s/-/+/ a.py")]),
        say("done two"),
        say("done three"),
    )
    process = await rig.start(None, "--input-format", "stream-json", stdin=True)
    results = [(await process.say(text))["result"] for text in ("one", "two", "three")]
    assert results == ["read it", "done two", "done three"]
    run = await process.end()
    assert [node.parent for node in run.nodes] == [None, *run.nodes[:-1]]


COMPACTED = ["main", "main", "compaction", "main.1"]


async def test_compaction_by_command_within_a_process(rig: Rig) -> None:
    rig.script(say("", bash("echo 1")), say("one done"), SUMMARY, say("after"))
    process = await rig.start(None, "--input-format", "stream-json", stdin=True)
    results = [(await process.say(text))["result"] for text in ("one", "/compact", "two")]
    assert results == ["one done", "", "after"]
    run = await process.end()
    assert [node.branch for node in run.nodes] == COMPACTED
    assert run.nodes[-1].origin == "compaction"
    assert "SUMMARY OF SESSION" in json.dumps(run.model_requests[-1])


async def test_compaction_by_command_in_a_process_of_its_own(rig: Rig) -> None:
    rig.script(say("", bash("echo 1")), say("one done"), SUMMARY, say("after"))
    await rig.claude("one", "--session-id", SESSION)
    await rig.claude("/compact", "--resume", SESSION)
    assert (await rig.claude("two", "--resume", SESSION)).result["result"] == "after"
    assert [node.branch for node in rig.tree().nodes] == COMPACTED


def big(tokens: int) -> Turn:
    return say(f"at {tokens}", bash("echo x"), prompt_tokens=tokens)


WINDOWS = [
    Behaviour(
        name="a window of tokens",
        script=[big(30_000), big(60_000), big(90_000), SUMMARY, say("Done.", prompt_tokens=3_000)],
        env={"CLAUDE_CODE_AUTO_COMPACT_WINDOW": "100000"},
    ),
    Behaviour(
        name="a part of the window",
        script=[big(30_000), big(60_000), SUMMARY, say("Done.", prompt_tokens=3_000)],
        env={"CLAUDE_CODE_AUTO_COMPACT_WINDOW": "100000", "CLAUDE_AUTOCOMPACT_PCT_OVERRIDE": "40"},
    ),
]


@pytest.mark.parametrize(
    ("behaviour", "rig"),
    in_ways(WINDOWS, [ATOMIC, Way("messages")], "a part of the window"),
    indirect=["rig"],
)
async def test_compaction_by_the_tokens_that_the_server_counts(rig: Rig, behaviour: Behaviour) -> None:
    run = await play(rig, behaviour)
    assert [node.branch for node in run.nodes][-2:] == ["compaction", "main.1"]
    assert run.nodes[-1].origin == "compaction"
    assert sum(event.get("subtype") == "compact_boundary" for event in run.events) == 1


OVERFLOW = {
    "chat": "This model's maximum context length is 1000 tokens. However, your request has 250000 input tokens. "
    "Please reduce the length of the input messages.",
    "messages": "prompt is too long: 250000 tokens > 200000 maximum",
}


@pytest.mark.parametrize("rig", WAYS, indirect=True, ids=str)
async def test_compaction_because_the_server_refuses_a_prompt_that_is_too_long(rig: Rig) -> None:
    rig.model.max_model_len = 1000
    steps = [say(f"step {n}", bash(f"echo {n}")) for n in range(4)]
    run = await play(
        rig,
        Behaviour(
            name="reactive",
            script=[*steps, Fail(status=400, message=OVERFLOW[rig.way.wire]), SUMMARY, DONE],
        ),
    )
    assert run.statuses == ["ok"] * 4 + ["error", "ok", "ok"]
    assert run.nodes[-1].origin == "compaction"
    assert "prompt is too long" in json.loads(run.calls[4].response)["error"]["message"]


async def test_an_answer_that_does_not_fit_is_made_shorter(rig: Rig) -> None:
    """The gateway gives way itself; the CLI never hears of it."""
    message = (
        "This model's maximum context length is 200000 tokens. However, you requested 32000 output tokens and "
        "your prompt contains 188240 input tokens, for a total of 220240 tokens. Please reduce the length of the "
        "input prompt or the number of requested output tokens."
    )
    rig.model.tokenizes = False
    run = await play(rig, Behaviour(name="fit", script=[Fail(status=400, message=message), DONE]))
    assert run.statuses == ["ok"]
    assert [body["max_tokens"] for body in run.model_requests] == [32_000, 200_000 - 188_240]


@pytest.mark.parametrize("rig", [Way("messages")], indirect=True, ids=str)
async def test_a_relayed_refusal_of_max_tokens_is_answered_by_the_cli(rig: Rig) -> None:
    message = (
        "input length and `max_tokens` exceed context limit: 188240 + 21333 > 200000, decrease input length or "
        "`max_tokens` and try again"
    )
    run = await play(rig, Behaviour(name="fit", script=[Fail(status=400, message=message), DONE]))
    assert run.statuses == ["error", "ok"]
    assert [body["max_tokens"] for body in run.model_requests] == [32_000, 10_760]


async def test_a_background_command_reports_into_the_same_line_of_calls(rig: Rig) -> None:
    run = await play(
        rig,
        Behaviour(
            name="background",
            script=[
                say("", bash("sleep 0.2; echo bgdone", run_in_background=True)),
                say("", bash("sleep 0.6; echo fg")),
                DONE,
            ],
        ),
    )
    assert "task-notification" in json.dumps(run.model_requests[-1])
    assert [node.parent for node in run.nodes] == [None, *run.nodes[:-1]]


async def test_two_sessions_at_once_do_not_mix(rig: Rig) -> None:
    rig.script(LEFT=[say("", bash("echo l")), say("left")], RIGHT=[say("", bash("echo r")), say("right")])
    left, right = await asyncio.gather(rig.start("LEFT"), rig.start("RIGHT"))
    results = [(await process.end()).result["result"] for process in (left, right)]
    assert results == ["left", "right"]
    roots = [node for node in rig.tree().nodes if node.parent is None]
    assert len(roots) == 2
    assert all(len(root.children) == 1 for root in roots)
