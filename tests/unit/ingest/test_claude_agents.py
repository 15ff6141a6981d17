"""Claude Code's logs: subagents in the three places where versions wrote them, and the request ledger."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from understudy.ingest.claude_code.log_format import ClaudeCodeFormat
from understudy.ingest.trace import Trace, TraceParent, expand

from support.claude_log import MODEL, Log, by_message, outline, read, thinking

ANSWER = "msg_0000000000000001"
NEXT = "msg_0000000000000002"
LAST = "msg_0000000000000003"
SUB = "msg_0000000000000011"
SUB2 = "msg_0000000000000012"


def main(version: str, agents: dict[str, str]) -> Log:
    """A session that starts an agent for each tool use id with its prompt."""
    log = Log("s1", version)
    log.user("work")
    calls = [(call, "Task", {"prompt": prompt, "description": "d"}) for call, prompt in agents.items()]
    log.assistant(ANSWER, *calls)
    return log


def agent(version: str, prompt: str, message_id: str, **envelope: Any) -> Log:
    log = Log("s1", version, isSidechain=True, **envelope)
    log.user(prompt)
    log.assistant(message_id, "found")
    return log


def subagents(traces: list[Trace]) -> dict[str, TraceParent | None]:
    return {trace.turns[0].message_id: trace.parent for trace in traces if trace.role == "subagent"}


def test_subagents_among_the_lines_of_the_session() -> None:
    log = main("1.0.69", {"t1": "explore code", "t2": "explore text"})
    above = log.last
    for prompt, message_id in (("explore text", SUB), ("explore code", SUB2)):
        log.user(prompt, parent=None, isSidechain=True)
        log.assistant(message_id, "found", isSidechain=True)
    log.last = above
    log.result("t2", "text found")
    log.result("t1", "code found")
    log.assistant(NEXT, "Both.")
    traces = read(log)
    assert subagents(traces) == {SUB: TraceParent("s1", "t2", 1), SUB2: TraceParent("s1", "t1", 1)}
    states = by_message(*traces)
    assert outline(states[SUB]) == ["user: explore text"]
    assert outline(states[NEXT])[2:] == ["t2: text found", "t1: code found"]
    assert len({trace.trace_id for trace in traces}) == 3 and states[SUB].parent == TraceParent("s1", "t2", 1)


def test_subagents_in_files_beside_the_session() -> None:
    log = main("2.0.76", {"t1": "explore"})
    log.result("t1", "found", toolUseResult={"agentId": "a1b2c3d", "content": []})
    log.assistant(NEXT, "Done.")
    sub = agent("2.0.76", "explore", SUB, agentId="a1b2c3d")
    warm = agent("2.0.76", "Warmup", SUB2, agentId="a999999")
    traces = read(log, **{"agent-a1b2c3d.jsonl": sub.data(), "agent-a999999.jsonl": warm.data()})
    assert subagents(traces) == {SUB: TraceParent("s1", "t1", 1)}
    assert [trace.role for trace in traces] == ["main", "subagent", "warmup"]
    assert {trace.session_id for trace in traces} == {"s1"}


def test_nested_subagents_are_traces_with_their_parents() -> None:
    log = main("2.1.197", {"t1": "explore"})
    log.result("t1", "found")
    sub = agent("2.1.197", "explore more", SUB, agentId="a1")
    sub.assistant(SUB2, ("t9", "Agent", {"prompt": "deeper"}))
    deeper = agent("2.1.197", "deeper", "msg_0000000000000013", agentId="a2")
    compact = agent("2.1.197", "sum up", "msg_0000000000000014", agentId="acompact-0a1b2c")
    traces = read(
        log,
        **{
            "s1/subagents/agent-a1.jsonl": sub.data(),
            "s1/subagents/agent-a1.meta.json": b'{"agentType":"Explore","toolUseId":"t1","spawnDepth":1}',
            "s1/subagents/agent-a2.jsonl": deeper.data(),
            "s1/subagents/agent-a2.meta.json": b'{"agentType":7}',
            "s1/subagents/agent-acompact-0a1b2c.jsonl": compact.data(),
        },
    )
    assert subagents(traces) == {
        SUB: TraceParent("s1", "t1", 1),
        "msg_0000000000000013": TraceParent("s1", "t9", 2),
    }
    assert [trace.agent for trace in traces] == [None, "Explore", None, None]
    assert traces[-1].role == "compact"


@pytest.mark.parametrize(("tools", "is_sent"), [("*", True), ("Bash, Agent", True), ("Bash, Read", False)])
@pytest.mark.parametrize("parallel", [False, True])
def test_a_subagent_that_may_start_agents_is_sent_their_list_with_its_first_results(
    tools: str, is_sent: bool, parallel: bool
) -> None:
    """2.1.232 sent it, but logged it only for the main agent."""
    lines = [f"- general-purpose: For everything. (Tools: {tools})"]
    log = Log("s1", "2.1.232")
    log.user("work")
    log.attachment("agent_listing_delta", addedLines=lines, isInitial=True, showConcurrencyNote=False)
    log.assistant(ANSWER, ("t1", "Agent", {"prompt": "explore", "description": "d"}))
    log.result("t1", "found")
    sub = Log("s1", "2.1.232", isSidechain=True, agentId="a1")
    sub.user("explore")
    sub.assistant(SUB, ("t2", "Bash"))
    if parallel:
        sub.result("t2", "a.py")
        sub.assistant(SUB, ("t3", "Bash"))
        sub.result("t3", "b.py")
    else:
        sub.result("t2", "a.py")
    sub.assistant(SUB2, ("t4", "Bash"))
    sub.result("t4", "1")
    sub.assistant(LAST, "Found.")
    meta = json.dumps({"agentType": "general-purpose", "toolUseId": "t1"}).encode()
    files = {"s1/subagents/agent-a1.jsonl": sub.data(), "s1/subagents/agent-a1.meta.json": meta}
    states = by_message(*read(log, **files))
    listed = "Available agent types for the Agent tool:\n- general-purpose"
    assert not any(listed in line for line in outline(states[SUB]))
    for message_id in (SUB2, LAST):
        with_list = [line.partition(":")[0] for line in outline(states[message_id]) if listed in line]
        assert with_list == (["t3" if parallel else "t2"] if is_sent else [])
        assert states[message_id].notes == ("reminders_not_logged",)


@pytest.mark.parametrize("agent_type", ["general-purpose", "Explore"])
@pytest.mark.parametrize("logs_own", [False, True])
def test_a_subagent_is_sent_the_list_of_skills_that_only_its_session_logs(agent_type: str, logs_own: bool) -> None:
    """2.1.122 sent it to the agent with all tools; later versions log it for each agent."""
    log = Log("s1", "2.1.122")
    log.user("work")
    log.attachment("skill_listing", content="- demo: Shows a demo")
    log.assistant(ANSWER, ("t1", "Agent", {"prompt": "explore", "description": "d"}))
    log.result("t1", "found")
    sub = Log("s1", "2.1.122", isSidechain=True, agentId="a1")
    sub.user("explore")
    if logs_own:
        sub.attachment("skill_listing", content="- demo: Shows a demo")
    sub.assistant(SUB, ("t2", "Bash"))
    sub.result("t2", "a.py")
    sub.assistant(SUB2, "Found.")
    meta = json.dumps({"agentType": agent_type, "toolUseId": "t1"}).encode()
    files = {"s1/subagents/agent-a1.jsonl": sub.data(), "s1/subagents/agent-a1.meta.json": meta}
    state = by_message(*read(log, **files))[SUB2]
    places = [line.partition(":")[0] for line in outline(state) if "skills are available" in line]
    assert places == (["user"] if logs_own else ["t2"] if agent_type == "general-purpose" else [])


def test_a_subagent_log_without_its_session_is_read_as_a_trace() -> None:
    sub = agent("2.1.197", "explore", SUB)
    (trace,) = read(**{"s1/subagents/agent-a1.jsonl": sub.data()})
    assert trace.parent == TraceParent("s1", None, 1) and len(list(expand(trace))) == 1


# --- the ledger -------------------------------------------------------------------------------------------


def named(message: dict[str, Any]) -> str:
    text = json.dumps(message, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def with_ledger() -> tuple[Log, dict[str, dict[str, Any]]]:
    """Two requests; what was sent says more than the records do."""
    log = Log("s1", "2.1.329")
    sent = {
        "first": {"role": "user", "content": [{"type": "text", "text": "<system-reminder>ü</system-reminder>hi"}]},
        "result": {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "one"}]},
        "note": {"role": "system", "content": "be brief"},
    }
    shape = {
        "system": [{"type": "text", "text": "You are Claude Code."}, {"type": "text", "text": "Be good."}],
        "tools": [{"name": "Bash", "description": "Runs.", "input_schema": {"type": "object"}}],
    }
    answer = [thinking("hm"), {"type": "tool_use", "id": "t1", "name": "Bash", "input": {"b": 1, "a": "é"}}]
    for message in sent.values():
        log.aside("api-request-blob", hash=named(message), message=message)
    log.aside("api-request-shape", shapeHash="s", shape=shape)
    log.aside("api-request", id="r1", keep=0, tail=[named(sent["first"])], shapeHash="s")
    log.user("hi")
    log.assistant(ANSWER, *answer, requestRef="r1")
    log.result("t1", "one")
    tail = [named({"role": "assistant", "content": answer}), named(sent["result"]), named(sent["note"])]
    log.aside("api-request", id="r2", base="r1", keep=1, tail=tail, shapeHash="s")
    log.assistant(NEXT, "Done.", requestRef="r2")
    return log, sent


def test_states_with_a_ledger_take_their_messages_from_it() -> None:
    log, _ = with_ledger()
    (trace,) = read(log)
    first, second = expand(trace)
    assert [state.fidelity for state in (first, second)] == ["ledger", "ledger"]
    assert first.messages[0] == {"role": "system", "content": "You are Claude Code.\nBe good."}
    assert outline(second)[1:] == [
        "user: <system-reminder>ü</system-reminder>hi",
        "assistant: +t1",
        "t1: one",
        "user: be brief",
    ]
    assert second.tools == [
        {
            "type": "function",
            "function": {"name": "Bash", "description": "Runs.", "parameters": {"type": "object"}},
        }
    ]
    assert second.student_action.content == "Done." and first.student_action.thinking == "hm"
    assert not trace.losses


@pytest.mark.parametrize("damage", ["blob", "base", "keep", "shape"])
def test_a_damaged_ledger_leaves_the_records(damage: str) -> None:
    log, sent = with_ledger()
    if damage == "blob":
        log.lines = [line for line in log.lines if line.get("hash") != named(sent["note"])]
    elif damage == "base":
        log.lines = [line for line in log.lines if line.get("id") != "r1"]
    elif damage == "keep":
        log.lines = [{**line, "keep": 9} if line.get("id") == "r2" else line for line in log.lines]
    else:
        log.lines = [line for line in log.lines if "shape" not in line]
    state = by_message(*read(log))[NEXT]
    assert state.fidelity == ("ledger" if damage == "shape" else "exact")
    assert outline(state)[-1].startswith("user" if damage == "shape" else "t1: one")
    assert state.tools_source == ("version" if damage == "shape" else "logged")


def test_messages_that_the_records_have_are_not_in_the_ledger_twice() -> None:
    """2.1.329 names them by their hash only: a prompt, the results of parallel calls in one message, and both."""
    log = Log("s1", "2.1.329")
    calls = [{"type": "tool_use", "id": key, "name": "Skill", "input": {}} for key in ("t1", "t2")]
    results = [{"type": "tool_result", "tool_use_id": key, "content": key} for key in ("t2", "t1")]
    skill = {"type": "text", "text": "Use it so."}
    prompt = named({"role": "user", "content": [{"type": "text", "text": "hi"}]})
    log.aside("api-request", id="r1", keep=0, tail=[prompt])
    log.user("hi")
    first = log.assistant(ANSWER, *calls, requestRef="r1")
    for result in results:
        log.user([result], parent=first)
    log.user([skill])
    answer = named({"role": "assistant", "content": calls})
    both = named({"role": "user", "content": [*results, skill]})
    log.aside("api-request", id="r2", base="r1", keep=1, tail=[answer, both])
    log.assistant(NEXT, "Done.", requestRef="r2")
    alone = named({"role": "user", "content": results})
    log.aside("api-request", id="r3", base="r1", keep=1, tail=[answer, alone])
    log.assistant(LAST, "Done otherwise.", parent=first, requestRef="r3")
    states = by_message(*read(log))
    assert {state.fidelity for state in states.values()} == {"ledger"}
    assert outline(states[NEXT]) == ["user: hi", "assistant: +t1 +t2", "t2: t2", "t1: t1", "user: Use it so."]
    assert outline(states[LAST])[2:] == ["t2: t2", "t1: t1"]


def test_a_fork_finds_its_requests_in_the_ledger_of_the_original() -> None:
    """A fork has the turns from before it, and of the ledger only what came after."""
    original, _ = with_ledger()
    original.lines[0]["padding"] = "x" * (1 << 17)  # an answer comes late where system prompts are before it
    fork = Log("s0", "2.1.329")
    messages = [line for line in original.lines if line["type"] in ("user", "assistant")]
    fork.lines = [{**line, "sessionId": "s0"} for line in messages]
    fork.lines[0] = {**fork.lines[0], "timestamp": "2026-11-21T09:00:00.000Z"}
    states = by_message(*read(fork, original))
    assert states.keys() == {ANSWER, NEXT}
    assert {state.fidelity for state in states.values()} == {"ledger"}
    assert outline(states[NEXT])[-1] == "user: be brief"


def test_a_cycle_of_base_requests_in_a_ledger_falls_back_to_the_records() -> None:
    log, _ = with_ledger()
    log.lines = [{**line, "base": "r2"} if line.get("id") == "r1" else line for line in log.lines]
    assert {state.fidelity for state in by_message(*read(log)).values()} == {"exact"}


# --- the files --------------------------------------------------------------------------------------------


def test_detection_accepts_claude_code_logs_and_rejects_other_json() -> None:
    log = Log()
    log.user("hi")
    reader = ClaudeCodeFormat()
    assert reader.detect("/x/s1.jsonl", log.data())
    assert reader.detect("/x/s1.jsonl", json.dumps(log.lines[0]).encode())
    assert reader.detect("/x/s1/subagents/agent-a1.meta.json", b"{}")
    assert not reader.detect("/x/s1.json", log.data())
    assert not reader.detect("/x/rows.jsonl", b'{"messages":[{"role":"user","content":"hi"}]}')
    assert not reader.detect("/x/other.meta.json", b"{}")
    gemini = b'{"sessionId":"s","projectHash":"f00d"}\n{"id":"m1","type":"user","content":[{"parentUuid":null}]}\n'
    assert not reader.detect("/x/session.jsonl", gemini)
    assert reader.group("/x/p/s1/subagents/agent-a1.jsonl") == reader.group("/x/p/s1.jsonl") == "/x/p"


def test_the_version_and_the_model_are_those_of_the_log() -> None:
    log = Log(version="1.0.128", cwd="/elsewhere")
    log.user("hi")
    log.assistant(ANSWER, "hello", model="glm-4.7")
    (trace,) = read(log)
    assert (trace.version, trace.project) == ("1.0.128", "/elsewhere")
    assert trace.turns[0].model == "glm-4.7" != MODEL
